import socket
from pathlib import Path

import pytest

# Addresses and names that are reserved for documentation.
OUTSIDE = [
    (socket.AF_INET, "192.0.2.1"),
    (socket.AF_INET, "gateway.example"),
    (socket.AF_INET6, "2001:db8::1"),
]


@pytest.mark.parametrize("method", ["connect", "connect_ex"])
@pytest.mark.parametrize(("family", "host"), OUTSIDE)
def test_a_connection_to_another_machine_fails_the_test(
    family: socket.AddressFamily, host: str, method: str
) -> None:
    with (
        socket.socket(family) as client,
        pytest.raises(AssertionError, match=f"tried to connect to .*{host}"),
    ):
        getattr(client, method)((host, 443))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_connection_to_loopback_is_made(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.connect((host, server.getsockname()[1]))
        assert client.getpeername() == server.getsockname()


def test_a_connection_to_a_unix_socket_is_made(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(path)
        server.listen()
        assert client.connect_ex(path) == 0
