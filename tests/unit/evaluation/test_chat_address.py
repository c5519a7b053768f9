"""How `--engine` names a model behind chat completions."""

import pytest

from verl_multiturn.cli.eval import check_engine
from verl_multiturn.clients.http_connections import trusted
from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.chat_address import ChatAddress, chat_address


@pytest.mark.parametrize("engine", ["sglang", "http://127.0.0.1:30000", "HTTP://h:1/v1", "http://h:1/v1/completions"])
def test_other_engines_name_no_model(engine: str) -> None:
    check_engine(engine)
    assert chat_address(engine) is None


def test_certificates_are_trusted_whatever_the_case_of_a_scheme() -> None:
    found = [trusted(address).cert_store_stats()["x509_ca"] > 0 for address in ("https://h", "HTTPS://h", "http://h")]
    assert found == [True, True, False]


def test_a_model_is_named_behind_its_address() -> None:
    found = chat_address("https://h/v1/chat/completions/#vendor/model:free")
    assert found == ChatAddress("https://h/v1", "vendor/model:free")
    assert found.name == "vendor/model:free at https://h/v1"


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("https://h/v1/chat/completions", r"names no model, .*write it behind .*https://h/v1/chat/completions#MODEL$"),
        ("https://h/v1/chat/completions# ", "names no model"),
        ("https://h/v1#m", "only an address that ends in /chat/completions names a model; leave #m out"),
        ("https://me:secret@h/v1/chat/completions#m", "expected an address without a user, a password or a query"),
        ("h/v1/chat/completions#m", "expected sglang, or an address that begins with http"),
    ],
)
def test_an_address_that_cannot_be_asked_is_refused(engine: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_engine(engine)
