"""A person with a browser that knows neither scripts nor styles: pages of the console by HTTP, and what is on them."""

from collections.abc import Mapping
from html.parser import HTMLParser
from http.cookies import SimpleCookie
from typing import Any, Final, Self
from urllib.parse import urlencode

from metaq.protocol.remoting.signature import Credentials
from metaq.server.console.visit import ROOT
from tests.support.rest import LastingConnection

FORM: Final = "application/x-www-form-urlencoded"
VOID: Final = frozenset(("meta", "link", "input", "img", "br", "hr", "meter"))


class HtmlForm:
    """A form of a page, with the values that its fields have."""

    def __init__(self, action: str, method: str) -> None:
        self.action = action
        self.method = method
        self.fields: dict[str, str] = {}


class ShownPage(HTMLParser):
    """An answer, and its elements if it is a page."""

    def __init__(self, status: int, headers: Mapping[str, str], data: bytes) -> None:
        super().__init__()
        self.status = status
        self.headers = headers
        """By names in small letters."""
        self.data = data
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.forms: list[HtmlForm] = []
        self.links: dict[str, str] = {}
        """Addresses by their words."""
        self.alerts: list[str] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self._link: tuple[str, list[str]] | None = None
        self._alert: list[str] | None = None
        self._select = ""
        if headers.get("content-type", "").startswith("text/html"):
            self.feed(data.decode())
            self.close()

    @property
    def text(self) -> str:
        """All words of the page."""
        return " ".join(" ".join(self.words).split())

    @property
    def alert(self) -> str:
        """The sentence of an error; empty without."""
        return " ".join(self.alerts)

    def form(self, action: str) -> HtmlForm:
        """The only form with this action that posts."""
        [found] = [form for form in self.forms if form.action == action and form.method == "post"]
        return found

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.elements.append((tag, given))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "form":
            self.forms.append(HtmlForm(given.get("action", ""), given.get("method", "get")))
        if tag == "a":
            self._link = given.get("href", ""), []
        if given.get("role") == "alert":
            self._alert = []
        if self.forms and given.get("name"):
            self._field(tag, given)
        if tag == "option" and self._select and ("selected" in given or self._select not in self.forms[-1].fields):
            self.forms[-1].fields[self._select] = given.get("value", "")

    def _field(self, tag: str, given: dict[str, str]) -> None:
        fields = self.forms[-1].fields
        if tag == "select":
            self._select = given["name"]
        elif tag == "textarea" or (tag == "input" and (given.get("type") not in ("checkbox", "radio") or "checked" in given)):
            fields[given["name"]] = given.get("value", "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> ends nothing on this page"
        if tag == "a" and self._link is not None:
            self.links.setdefault(" ".join("".join(self._link[1]).split()), self._link[0])
            self._link = None
        if tag == "select":
            self._select = ""
        if self._alert is not None:
            self.alerts.append(" ".join("".join(self._alert).split()))
            self._alert = None

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._link is not None:
            self._link[1].append(data)
        if self._alert is not None:
            self._alert.append(data)


class Visits:
    """Opens pages of one broker, and keeps the cookie that it is given."""

    def __init__(self, address: str, who: Credentials | None = None) -> None:
        """With ``who``, log in first."""
        host, _, port = address.rpartition(":")
        self.address = address
        self.cookie = ""
        self._cookie_name = f"metaq_login_{port}"
        self.last_cookie: Any = None
        self._connection = LastingConnection(host.strip("[]"), int(port))
        if who is not None:
            answer = self.send("POST", f"{ROOT}/login", {"name": who.name, "password": who.secret})
            assert answer.status == 303, answer.alert

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def send(
        self, method: str, path: str, fields: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
    ) -> ShownPage:
        """Send any request, and return its answer, whatever it is."""
        data = None if fields is None else urlencode(fields).encode()
        more = {} if data is None else {"Content-Type": FORM}
        if self.cookie:
            more["Cookie"] = f"{self._cookie_name}={self.cookie}"
        self._connection.renew()
        self._connection.request(method, path, data, {**more, **(headers or {})})
        answer = self._connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        if "set-cookie" in found:
            [self.last_cookie] = SimpleCookie(found["set-cookie"]).values()
            assert self.last_cookie.key == self._cookie_name
            self.cookie = self.last_cookie.value
        return ShownPage(answer.status, found, answer.read())

    def page(self, path: str, expected: int = 200, /, **query: object) -> ShownPage:
        """Open a page below ``ROOT``."""
        answer = self.send("GET", f"{ROOT}{path}" + (f"?{urlencode(query)}" if query else ""))
        assert answer.status == expected, (answer.status, answer.alert, answer.data[-400:])
        assert answer.open == [], "all elements end"
        return answer

    def submit(self, page: ShownPage, action: str, status: int = 303, **fields: str) -> ShownPage:
        """Fill in a form of a page and send it; after a change, return the page to which it leads."""
        form = page.form(f"{ROOT}{action}")
        answer = self.send("POST", form.action, {**form.fields, **fields})
        assert answer.status == status, (answer.status, answer.alert)
        return self.send("GET", answer.headers["location"]) if status == 303 else answer
