"""Orders to replicas by forms, without a browser: what refuses them."""

from pathlib import Path

from metaq.server.console.visit import ROOT
from tests.support.cluster import Cluster
from tests.support.console import Visits


def test_what_is_refused(tmp_path: Path) -> None:
    """E-32, E-05: orders without a choice, without the token, or of a suspect replica; each with its reason."""
    with Cluster(tmp_path) as cluster:
        master, slave = cluster.pair()
        with Visits(master.http) as visits:
            cluster_page = visits.page("/cluster").text
            assert "This replica" in cluster_page and "Demote" in cluster_page
            assert "was not elected" in visits.page("/cluster/hand-over").text
            for path, asks in (("hand-over", "choose the replica"), ("demote", "name the master")):
                answer = visits.submit(visits.page(f"/cluster/{path}"), f"/cluster/{path}", 400)
                assert asks in answer.alert
            form = visits.page("/cluster/promote")
            assert "is the master already" in form.text and "lack acknowledged messages" not in form.text
            assert "already the master" in visits.submit(form, "/cluster/promote", 400).alert
            wrong = visits.submit(visits.page("/cluster/demote"), "/cluster/demote", 400, master="nowhere")
            assert wrong.form(f"{ROOT}/cluster/demote").fields["master"] == "nowhere"
        with Visits(slave.http) as visits:
            assert visits.send("POST", f"{ROOT}/cluster/promote", {"accept_loss": "true"}).status == 403
            assert "Hand over on its master" in visits.page("/cluster/hand-over").text
            assert "is a slave already" in visits.page("/cluster/demote").text
        assert (master.status()["role"], slave.status()["role"]) == ("master", "slave")
        assert "console change" not in master.stderr() + slave.stderr()
