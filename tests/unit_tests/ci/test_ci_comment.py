"""`ci comment`, against servers that keep comments as GitHub and GitLab do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner
from typing_extensions import override

from pytest_megatron.ci.command import command

TOKEN = "a-token"  # noqa: S105 - of the server below


class Comments(BaseHTTPRequestHandler):
    """Comments of one request, in pages of 100 at most, as both services have them."""

    kept: ClassVar[dict[int, str]] = {}
    foreign: ClassVar[set[int]] = set()
    asked: ClassVar[list[str]] = []
    to_fail: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        page = int(query["page"][0])
        rows = [{"id": number, "body": body} for number, body in sorted(self.kept.items())]
        self._answer(200, rows[100 * (page - 1) : 100 * page])

    def do_POST(self) -> None:
        body = self._body()
        if self.to_fail:
            code = self.to_fail.pop()
            if code >= 500:  # it did it, and the answer was lost
                self.kept[max(self.kept, default=0) + 1] = body
            self._answer(code, {"message": "no"})
        else:
            self.kept[max(self.kept, default=0) + 1] = body
            self._answer(201, {})

    def do_PATCH(self) -> None:
        number, body = int(self.path.rpartition("/")[2]), self._body()
        if number in self.foreign:
            self._answer(403, {"message": "Must have admin rights"})
        else:
            self.kept[number] = body
            self._answer(200, {})

    do_PUT = do_PATCH  # noqa: N815

    @override
    def log_message(self, *_: object) -> None: ...

    def _body(self) -> str:
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["body"]
        assert isinstance(text, str)
        return text

    def _answer(self, code: int, value: object) -> None:
        token = self.headers.get("Authorization") or self.headers.get("PRIVATE-TOKEN") or ""
        code = code if token.endswith(TOKEN) else 401
        self.asked.append(f"{self.command} {urlsplit(self.path).path}")
        text = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    for found in (Comments.kept, Comments.foreign, Comments.asked, Comments.to_fail):
        found.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Comments) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def github(url: str, run: int = 4711, **more: str) -> dict[str, str]:
    return {
        "GITHUB_ACTIONS": "true",
        "GITHUB_API_URL": url,
        "GITHUB_EVENT_NAME": "pull_request",
        "GITHUB_REF": "refs/pull/12/merge",
        "GITHUB_REPOSITORY": "you/project",
        "GITHUB_RUN_ATTEMPT": "1",
        "GITHUB_RUN_ID": str(run),
        "GITHUB_SERVER_URL": "https://github.com",
        "GITHUB_TOKEN": TOKEN,
        "GITHUB_WORKFLOW": "megatron",
        **more,
    }


def gitlab(url: str) -> dict[str, str]:
    return {
        "GITLAB_CI": "true",
        "CI_API_V4_URL": f"{url}/api/v4",
        "CI_JOB_NAME": "verdict",
        "CI_MERGE_REQUEST_IID": "3",
        "CI_PIPELINE_ID": "99",
        "CI_PIPELINE_URL": "https://gitlab.com/you/project/-/pipelines/99",
        "CI_PROJECT_ID": "7",
        "GITLAB_TOKEN": TOKEN,
    }


def comment(env: dict[str, str], text: str = "## it failed") -> str:
    """Run the command in this environment and no other; return what it prints."""
    Path("comment.md").write_text(text)
    cleared = dict.fromkeys(("GITHUB_ACTIONS", "GITLAB_CI", "GH_TOKEN", "GITHUB_TOKEN"), "")
    done = CliRunner().invoke(command, ["comment", "comment.md"], env={**cleared, **env})
    assert done.exit_code == 0, done.output
    return done.output


def test_the_comment_of_a_pull_request_is_updated_in_place(url: str) -> None:
    Comments.kept.update(dict.fromkeys(range(1, 151), "somebody's"))
    assert comment(github(url)) == "a comment is written\n"
    assert comment(github(url, 4712), "## all passed") == "the comment is updated\n"
    assert len(Comments.kept) == 151
    assert Comments.kept[151].splitlines() == [
        "<!-- pytest-megatron: megatron run 4712 try 1 -->",
        "## all passed",
        "",
        "[All of this run](https://github.com/you/project/actions/runs/4712)",
    ]
    assert Comments.asked[-1] == "PATCH /repos/you/project/issues/comments/151"


def test_a_run_that_ends_late_does_not_replace_the_result_of_a_later_one(url: str) -> None:
    comment(github(url, 4712), "later")
    assert comment(github(url), "earlier") == "the comment of run 4712, a later one, is left\n"
    assert "later" in Comments.kept[1]
    comment(github(url, 4712, GITHUB_RUN_ATTEMPT="2"), "again")
    assert "again" in Comments.kept[1]


def test_each_workflow_has_its_own_comment(url: str) -> None:
    comment(github(url))
    comment(github(url, GITHUB_WORKFLOW="nightly --> <b>"))
    assert len(Comments.kept) == 2
    assert Comments.kept[2].startswith("<!-- pytest-megatron: nightly --_ _b_ run 4711 try 1 -->\n")


def test_a_copy_of_the_first_line_by_somebody_else_stops_nothing(url: str) -> None:
    Comments.kept[1] = "<!-- pytest-megatron: megatron run 1 try 1 -->\nmine"
    Comments.foreign.add(1)
    assert comment(github(url)) == "a comment is written\n"
    assert "mine" in Comments.kept[1]


def test_a_merge_request_of_gitlab_has_one_note(url: str) -> None:
    assert comment(gitlab(url)) == "a comment is written\n"
    assert comment(gitlab(url)) == "the comment is updated\n"
    path = "/api/v4/projects/7/merge_requests/3/notes"
    assert Comments.asked == [f"GET {path}", f"POST {path}", f"GET {path}", f"PUT {path}/1"]


def test_a_lost_answer_makes_no_second_comment(url: str) -> None:
    Comments.to_fail.append(502)
    assert comment(github(url)) == "the comment is updated\n"
    assert len(Comments.kept) == 1


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"GITHUB_TOKEN": ""}, "GITHUB_TOKEN is not set"),
        ({"GITHUB_REF": "refs/heads/main", "GITHUB_EVENT_NAME": "push"}, "a run for push has no"),
        ({"GITHUB_TOKEN": "of a fork"}, "refuses it, HTTP 401: the token may not write comments"),
        ({"GITHUB_API_URL": "http://127.0.0.1:9"}, "cannot be reached: "),
        ({"GITHUB_ACTIONS": ""}, "neither a job of GitHub Actions nor one of GitLab"),
    ],
)
def test_where_no_comment_can_be_written_the_reason_is_printed(
    url: str, changed: dict[str, str], why: str
) -> None:
    assert why in comment({**github(url), **changed})
    assert Comments.kept == {}


def test_a_token_is_never_sent_in_the_clear(url: str) -> None:
    Path("comment.md").write_text("text")
    env = github(url, GITHUB_API_URL="http://github.example.com")
    done = CliRunner().invoke(command, ["comment", "comment.md"], env=env)
    assert done.exit_code != 0
    assert "is not https" in str(done.exception)


def test_the_number_of_a_pull_request_comes_from_the_event_where_the_ref_has_none(
    url: str, tmp_path: Path
) -> None:
    event = tmp_path / "event.json"
    event.write_text('{"pull_request": {"number": 15}}')
    comment(github(url, GITHUB_REF="refs/heads/main", GITHUB_EVENT_PATH=str(event)))
    assert Comments.asked[-1] == "POST /repos/you/project/issues/15/comments"
