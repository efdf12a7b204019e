"""What only a server can do to the store: go away, refuse, run without its driver."""

import logging
import sys

import pytest

from fedmjp.benchmarks.folder.store import Store
from fedmjp.errors import BadInputError, StoreError
from tests import databases
from tests.databases import PASSWORD, Server, trial

server, postgresql = databases.server, databases.postgresql


def refusal(url: str) -> str:
    with pytest.raises(BadInputError) as caught:
        Store.open(url)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in message
    assert "s3cr3t" not in message
    return message


def test_a_server_that_stops_is_told_in_one_line_and_the_store_goes_on_when_it_is_back(
    server: Server, postgresql: str, capfd: pytest.CaptureFixture[str]
) -> None:
    store = Store.open(postgresql)
    store.put([trial("a")])
    server.stop()
    try:
        for use in (lambda: store.put([trial("b")]), lambda: store.finished(["a"]), store.frame):
            with pytest.raises(StoreError, match=r"finished trials are kept; .* and run again$") as caught:
                use()
            assert "\n" not in str(caught.value)
            assert PASSWORD not in str(caught.value)
        with pytest.raises(StoreError, match="Connection refused") as caught:  # of which a worker is started again
            Store.open(postgresql)
        assert caught.value.exit_code == 1
    finally:
        server.start()
    store.put([trial("b")])
    assert store.finished(["a", "b"]) == {"a", "b"}
    store.close()
    assert capfd.readouterr() == ("", "")


def test_a_connection_that_is_lost_within_a_transaction_is_told_once_and_nothing_of_it_stays(
    server: Server, postgresql: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # those of pytest would take what the driver logs
    store = Store.open(postgresql)
    rows = [{"sha256": name, "content": "{}"} for name in ("a", "b")]
    insert = "insert into environments values (%(sha256)s, %(content)s)"

    def write() -> None:
        with store.transaction() as connection:
            connection.exec_driver_sql(insert, rows[:1])
            backend = connection.exec_driver_sql("select pg_backend_pid()").scalar_one()
            server.execute(f"select pg_terminate_backend({backend}, 5000)")
            connection.exec_driver_sql(insert, rows)

    with pytest.raises(StoreError, match="see that the server runs"):
        write()
    assert capsys.readouterr().err == ""
    assert store.environments() == {}


def test_both_short_forms_mean_the_same(postgresql: str) -> None:
    Store.open(postgresql).put([trial("a")])
    assert Store.open(postgresql.replace("postgresql://", "postgres://")).finished(["a"]) == {"a"}


def test_a_wrong_password_is_told(server: Server) -> None:
    assert "password authentication failed" in refusal(server.url("postgres", password="wrong-s3cr3t"))


def test_a_password_in_the_query_is_not_shown(server: Server) -> None:
    url = f"postgresql://127.0.0.1:{server.port}/postgres?user=postgres&password=wrong-s3cr3t"
    assert "password authentication failed" in refusal(url)


def test_a_missing_database_is_told(server: Server) -> None:
    assert 'database "nowhere" does not exist' in refusal(server.url("nowhere"))


def test_missing_rights_are_told(server: Server, postgresql: str) -> None:
    server.execute(f"CREATE ROLE reader LOGIN PASSWORD '{PASSWORD}'")
    message = refusal(postgresql.replace("postgres:s3", "reader:s3"))
    assert "permission denied for schema public" in message
    assert "LINE" not in message


def test_an_unknown_option_of_the_url_is_told(postgresql: str) -> None:
    assert "sslmood" in refusal(f"{postgresql}?sslmood=require")


def test_a_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    message = refusal("postgresql://user:s3cr3t@127.0.0.1/trials")
    assert "pip install 'fedmjp[postgresql]'" in message
