"""The comment on a pull request of GitHub, or the note on a merge request of GitLab.

One comment for each workflow, updated in place. It is found by its first line, a comment of HTML
with the run that wrote it, so that a run that ends late does not replace the result of a later one.

Source: GitHub's REST API, issue comments; GitLab's REST API, notes of merge requests.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from typing_extensions import override

from pytest_megatron.base.files import JsonValue, parse_json, read_json
from pytest_megatron.errors import CiError

_LIMIT_S = 20.0
_TRIES = 3
_PAGE = 100  # comments, the most that both services give at once
_MOST_PAGES = 50
_MARK = re.compile(r"<!-- pytest-megatron: (?P<name>.*) run (?P<run>\d+) try (?P<attempt>\d+) -->")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommentPlace:
    """Where the comment of a run belongs.

    Attributes:
        comments: URL of the comments of the pull or merge request.
        one: URL of one comment, before its id.
        update: HTTP method that changes one.
        headers: With the token.
        name: Name of the workflow.
        run: Number of the run, which grows from run to run.
        attempt: Number of the attempt of the run.
        link: URL of the run.
    """

    comments: str
    one: str
    update: str
    headers: Mapping[str, str]
    name: str
    run: int
    attempt: int
    link: str

    @property
    def mark(self) -> str:
        """The first line of the comment."""
        return f"<!-- pytest-megatron: {self.name} run {self.run} try {self.attempt} -->"


def comment_place(env: Mapping[str, str]) -> CommentPlace | str:
    """Return where the comment of this run belongs, or why there is no such place.

    Args:
        env: Variables of a job of GitHub Actions or of GitLab.

    Raises:
        CiError: A token would be sent in the clear, or GitHub's file of the event is broken.
    """
    if env.get("GITHUB_ACTIONS"):
        place = _on_github(env)
    elif env.get("GITLAB_CI"):
        place = _on_gitlab(env)
    else:
        return "neither a job of GitHub Actions nor one of GitLab"
    if isinstance(place, CommentPlace):
        url = urllib.parse.urlsplit(place.comments)
        if url.scheme != "https" and url.hostname not in _LOOPBACK:
            raise CiError(place.comments, "is not https, expected https for a token")
    return place


def _on_github(env: Mapping[str, str]) -> CommentPlace | str:
    """Return where to comment on GitHub, or why not."""
    number = _pull_request(env)
    if number is None:
        return f"a run for {env.get('GITHUB_EVENT_NAME') or 'an event'} has no pull request"
    token = env.get("GITHUB_TOKEN") or env.get("GH_TOKEN")
    if not token:
        return (
            "GITHUB_TOKEN is not set; give the step `env: GITHUB_TOKEN: ${{ github.token }}`, and "
            "the job `permissions: pull-requests: write`"
        )
    repository, run = env["GITHUB_REPOSITORY"], env["GITHUB_RUN_ID"]
    api = f"{env.get('GITHUB_API_URL', 'https://api.github.com')}/repos/{repository}/issues"
    server = env.get("GITHUB_SERVER_URL", "https://github.com")
    return CommentPlace(
        comments=f"{api}/{number}/comments",
        one=f"{api}/comments",
        update="PATCH",
        headers={"Authorization": f"Bearer {token}", "Accept": "application/vnd.github+json"},
        name=_one_line(env.get("GITHUB_WORKFLOW", "")),
        run=int(run),
        attempt=int(env.get("GITHUB_RUN_ATTEMPT", "1")),
        link=f"{server}/{repository}/actions/runs/{run}",
    )


def _pull_request(env: Mapping[str, str]) -> int | None:
    """Return the number of the pull request that this run is for."""
    found = re.fullmatch(r"refs/pull/(\d+)/(?:merge|head)", env.get("GITHUB_REF", ""))
    if found is not None:
        return int(found[1])
    path = env.get("GITHUB_EVENT_PATH", "")
    try:
        event = read_json(Path(path)) if path else None
    except (OSError, ValueError) as error:
        raise CiError(path, f"cannot be read: {error}") from error
    request = event.get("pull_request") if isinstance(event, Mapping) else None
    number = request.get("number") if isinstance(request, Mapping) else None
    return number if isinstance(number, int) else None


def _on_gitlab(env: Mapping[str, str]) -> CommentPlace | str:
    """Return where to comment on GitLab, or why not."""
    number = env.get("CI_MERGE_REQUEST_IID")
    if not number:
        return "a pipeline that is not of a merge request has none to comment on"
    token = env.get("GITLAB_TOKEN")
    if not token:
        return (
            "GITLAB_TOKEN is not set; add a project access token with the scope `api` as a CI/CD "
            "variable of that name"
        )
    project = f"{env['CI_API_V4_URL']}/projects/{env['CI_PROJECT_ID']}"
    notes = f"{project}/merge_requests/{number}/notes"
    return CommentPlace(
        comments=notes,
        one=notes,
        update="PUT",
        headers={"PRIVATE-TOKEN": token},
        name=_one_line(env.get("CI_JOB_NAME", "")),
        run=int(env["CI_PIPELINE_ID"]),
        attempt=1,
        link=env.get("CI_PIPELINE_URL", ""),
    )


def _one_line(name: str) -> str:
    return re.sub(r"[^\w ./:-]", "_", name)


def post_comment(place: CommentPlace, text: str) -> str:
    """Write the comment, or replace the one of an earlier run; return what was done.

    Raises:
        CiError: The server cannot be reached, or refuses it.
    """
    body = f"{place.mark}\n{text.rstrip()}\n\n[All of this run]({place.link})\n"
    for number in range(1, _TRIES + 1):
        try:
            return _post(place, body)
        except (urllib.error.URLError, TimeoutError) as error:
            # What was written before an answer was lost is found, and replaced, at the next try.
            is_refused = (
                isinstance(error, urllib.error.HTTPError)
                and error.code < HTTPStatus.INTERNAL_SERVER_ERROR
            )
            if is_refused or number == _TRIES:
                raise CiError(place.comments, _problem(error)) from error
    raise AssertionError


def _problem(error: OSError) -> str:
    """Describe why the server did not take a comment, and what to set."""
    if not isinstance(error, urllib.error.HTTPError):
        return f"cannot be reached: {getattr(error, 'reason', error)}"
    if error.code in _REFUSED:
        return (
            f"refuses it, HTTP {error.code}: the token may not write comments there; expected "
            "`pull-requests: write` on GitHub, which a pull request of a fork has not, or the "
            "scope `api` on GitLab"
        )
    return f"answers HTTP {error.code}"


def _post(place: CommentPlace, body: str) -> str:
    """Update the workflow's comment, or write a new one; return what was done."""
    for number, there in _comments_of_workflow(place):
        if (int(there["run"]), int(there["attempt"])) > (place.run, place.attempt):
            return f"the comment of run {there['run']}, a later one, is left"
        try:
            _ask(place, place.update, f"{place.one}/{number}", body)
        except urllib.error.HTTPError as error:
            if error.code not in _REFUSED:
                raise
            continue  # somebody else's, with a copy of our first line
        return "the comment is updated"
    _ask(place, "POST", place.comments, body)
    return "a comment is written"


def _comments_of_workflow(place: CommentPlace) -> Iterator[tuple[int, re.Match[str]]]:
    """Yield id and first line of comments that runs of this workflow wrote."""
    for page in range(1, _MOST_PAGES + 1):
        found = _ask(place, "GET", f"{place.comments}?per_page={_PAGE}&page={page}")
        rows = found if isinstance(found, list) else []
        for row in rows:
            number, text = (row.get("id"), row.get("body")) if isinstance(row, dict) else (0, "")
            there = _MARK.match(text) if isinstance(text, str) else None
            if there is not None and there["name"] == place.name and isinstance(number, int):
                yield number, there
        if len(rows) < _PAGE:
            return


def _ask(place: CommentPlace, method: str, url: str, body: str | None = None) -> JsonValue:
    """Send a request to the server, and return the JSON that it answers."""
    data = None if body is None else json.dumps({"body": body}).encode()
    headers = {**place.headers, "Content-Type": "application/json"}
    request = urllib.request.Request(url, data=data, headers=headers, method=method)  # noqa: S310 - https, or this host
    with _OPENER.open(request, timeout=_LIMIT_S) as answer:
        text = answer.read()
    try:
        return parse_json(text)
    except ValueError as error:
        raise CiError(url, f"answers with no JSON: {error}") from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Reports a redirection as an error: the token is for the host that was named."""

    @override
    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)
