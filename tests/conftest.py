"""Fixtures for the whole suite: private PostgreSQL and Redis servers, and the shared data folder.

A server that is already running is used where an environment variable names it; else a private
one is started on a free loopback port from installed binaries; else, as root, the binaries are
installed with apt. If all of that fails the tests that need it are skipped, and say so.
"""

import ipaddress
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of labelled real data, which is not part of the project."""
    candidates = [os.environ.get("TUNEGATE_SHARED_DATA"), str(REPOSITORY.parent / "shared/data")]
    for candidate in candidates:
        if candidate and Path(candidate).is_dir():
            return Path(candidate)
    pytest.skip("no shared data folder; set TUNEGATE_SHARED_DATA to run this test")


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A randomly initialised Llama of 60 thousand weights with a byte-level chat tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|im_start|>", "<|im_end|>"]
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
    bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=(
            "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
            "{{ message['content'] }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
        clean_up_tokenization_spaces=False,
    )
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("tiny-model")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_catalogue(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalogue file whose only model is the tiny one."""
    path = tmp_path_factory.mktemp("catalogue") / "catalogue.yaml"
    path.write_text(
        "models:\n"
        "  tiny:\n"
        "    default: true\n"
        f"    source: {{kind: folder, path: {tiny_model_folder}}}\n"
        "    lora: {rank: 4, alpha: 8, batch_size: 4, max_length: 512, learning_rate: 0.01}\n"
    )
    return path


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Redis server."""
    if url := os.environ.get("TUNEGATE_TEST_REDIS_URL"):
        yield url
        return
    binary = _binary("redis-server", [], "redis-server")
    if binary is None:
        pytest.skip("no Redis: set TUNEGATE_TEST_REDIS_URL or install redis-server")
    port = _free_port()
    folder = tmp_path_factory.mktemp("redis")
    server = subprocess.Popen(
        [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for_port(port, server)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.terminate()
        server.wait(timeout=30)


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an empty PostgreSQL database."""
    if url := os.environ.get("TUNEGATE_TEST_DATABASE_URL"):
        yield url
        return
    folders = sorted(str(path) for path in Path("/usr/lib/postgresql").glob("*/bin"))
    initdb = _binary("initdb", folders, "postgresql")
    if initdb is None:
        pytest.skip("no PostgreSQL: set TUNEGATE_TEST_DATABASE_URL or install postgresql")
    user = _unprivileged_user()
    # A private folder outside pytest's own, which other users may not enter.
    folder = Path(tempfile.mkdtemp(prefix="tunegate-postgres-"))
    if user is not None:
        shutil.chown(folder, user)
    prefix = ["runuser", "-u", user, "--"] if user is not None else []
    data, port = folder / "data", _free_port()
    environment = {**os.environ, "LC_ALL": "C"}
    subprocess.run(
        [*prefix, initdb, "-D", str(data), "-U", "tunegate", "--auth=trust", "--encoding=UTF8"],
        check=True, capture_output=True, cwd=folder, env=environment,
    )  # fmt: skip
    server = subprocess.Popen(
        [
            *prefix, str(Path(initdb).with_name("postgres")), "-D", str(data), "-p", str(port),
            "-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={folder}",
            "-c", "fsync=off",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder, env=environment,
    )  # fmt: skip
    try:
        _wait_for_port(port, server)
        _wait_for_database(port)
        yield f"postgresql+psycopg://tunegate@127.0.0.1:{port}/postgres"
    finally:
        server.terminate()
        server.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def _binary(name: str, folders: list[str], package: str) -> str | None:
    path = os.pathsep.join([os.environ.get("PATH", ""), *folders])
    found = shutil.which(name, path=path)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for arguments in (["update", "-qq"], ["install", "-y", "-qq", package]):
            command = ["apt-get", *arguments]
            subprocess.run(command, env=environment, capture_output=True, timeout=300, check=False)
        folders = sorted(str(path) for path in Path("/usr/lib/postgresql").glob("*/bin"))
        found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))
    return found


def _unprivileged_user() -> str | None:
    """PostgreSQL refuses to run as root; None when we are not root."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in known else "nobody"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_for_port(port: int, server: "subprocess.Popen[bytes]") -> None:
    for _ in range(600):
        if server.poll() is not None:
            raise RuntimeError(f"the private server ended at once with code {server.returncode}")
        with socket.socket() as client:
            client.settimeout(1)
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the private server did not listen on port {port}")


def _wait_for_database(port: int) -> None:
    """PostgreSQL listens before it takes queries."""
    import psycopg

    for attempt in range(300):
        try:
            psycopg.connect(f"host=127.0.0.1 port={port} user=tunegate dbname=postgres").close()
        except psycopg.OperationalError:
            if attempt == 299:
                raise
            time.sleep(0.1)
        else:
            return


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Python sockets of the test process reach this machine only, and the servers it was given.

    Neither child processes nor C libraries with sockets of their own (libpq) are covered.
    """
    allowed = _given_servers()
    patch = pytest.MonkeyPatch()
    for name in ("connect", "connect_ex"):
        patch.setattr(socket.socket, name, _local_only(getattr(socket.socket, name), allowed))
    yield
    patch.undo()


def _local_only(connect: Callable[..., Any], allowed: set[str]) -> Callable[..., Any]:
    def guarded(self: socket.socket, address: Any) -> Any:
        if self.family != socket.AF_UNIX and not _is_local(address, allowed):
            raise AssertionError(
                f"a test tried to connect to {address!r}; tests may use loopback and Unix sockets "
                "only. Serve what the test needs on 127.0.0.1."
            )
        return connect(self, address)

    return guarded


def _is_local(address: Any, allowed: set[str]) -> bool:
    host = str(address[0])
    if host == "localhost" or host in allowed:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _given_servers() -> set[str]:
    """Names and addresses of the servers that the environment tells the tests to use."""
    hosts: set[str] = set()
    for variable in ("TUNEGATE_TEST_REDIS_URL", "TUNEGATE_TEST_DATABASE_URL"):
        if host := urlsplit(os.environ.get(variable, "")).hostname:
            hosts |= {host, *(str(found[4][0]) for found in socket.getaddrinfo(host, None))}
    return hosts
