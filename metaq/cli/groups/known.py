"""Consumer groups that a command names: those that exist, and those that are called missing."""

from metaq.cli.common import NotThere
from metaq.client import Admin
from metaq.client.admin.views import GroupView
from metaq.suggestions import did_you_mean


def known_group(admin: Admin, name: str) -> GroupView:
    """Return a group's settings; ``NotThere`` when no broker knows it."""
    views = {view.name: view for view in admin.groups()}
    if name not in views:
        advice = did_you_mean(name, views) or "; metaq group list shows the groups"
        raise NotThere(f"no broker knows the group {name}{advice}")
    return views[name]
