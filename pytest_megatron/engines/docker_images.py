"""Finds the image of a container, and asks a registry for one that is not here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import docker
import docker.errors
import docker.utils
import requests.exceptions


class ImageRefusedError(Exception):
    """There is no such image to be had; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image that is on the daemon's machine.

    Attributes:
        id: `sha256:...`; nemo-run takes it as it is, and asks no registry for it.
        name: For provenance: with the registry's digest, where it came from one.
        entrypoint: What Docker puts before the command.
    """

    id: str
    name: str
    entrypoint: tuple[str, ...]


def find_image(
    client: docker.DockerClient,
    name: str,
    pull: Literal["missing", "never"],
    on_step: Callable[[str], None],
) -> Image:
    """Return an image by its name.

    Args:
        client: Of the daemon.
        name: As `docker run` takes it.
        pull: Whether to ask a registry for one that is missing.
        on_step: Called often while an image is fetched, with what is done.

    Raises:
        ImageRefusedError: It is missing and cannot be fetched, or must not.
    """
    try:
        found = client.images.get(name)
    except docker.errors.ImageNotFound as error:
        if pull == "never" or name.startswith("sha256:"):
            raise ImageRefusedError(
                "is not on this machine, and is not to be fetched; name one of `docker images`, "
                "or say `pull: missing`"
            ) from error
        _pull(client, name, on_step)
        found = client.images.get(name)
    attributes = found.attrs
    digests = attributes.get("RepoDigests") or []
    entrypoint = attributes.get("Config", {}).get("Entrypoint") or []
    return Image(
        id=found.id,
        name=digests[0] if digests else f"{name} {found.id[:19]}",
        entrypoint=tuple(entrypoint),
    )


def _pull(client: docker.DockerClient, name: str, on_step: Callable[[str], None]) -> None:
    """Fetch an image; nothing that stops answering keeps it for longer than the client's limit."""
    repository, tag = docker.utils.parse_repository_tag(name)
    on_step(f"fetching the image {name}")
    try:
        steps = client.api.pull(repository, tag=tag or "latest", stream=True, decode=True)
        for step in steps:
            if "error" in step:
                raise ImageRefusedError(_not_fetched(step["error"]))
            on_step(_line(name, step))
    except docker.errors.APIError as error:
        raise ImageRefusedError(_not_fetched(error.explanation)) from error
    except requests.exceptions.RequestException as error:
        raise ImageRefusedError(_not_fetched(error)) from error


def _line(name: str, step: Mapping[str, object]) -> str:
    return f"fetching the image {name}: {step.get('status', '')} {step.get('id', '')}".rstrip()


def _not_fetched(why: object) -> str:
    return (
        f"is not on this machine and cannot be fetched ({why}); see that `docker pull` works, or "
        f"name one of `docker images`"
    )
