"""Messages and descriptions: text of an artifact, a file or a caller adds no line to them and commands no terminal."""

import dataclasses
import pickle

import pytest

import kvgraft_jax as kg
from kvgraft_jax import errors
from kvgraft_jax import pin as pin_lib
from tests import tiny

HOSTILE = "a\nb\r\x1b[31m\x9b2J\u202e\u2028c"
ESCAPED = r"a\nb\r\x1b[31m\x9b2J\u202e\u2028c"


@pytest.fixture(scope="module")
def artifact():
    engine = tiny.engine()
    return engine.capture(engine.prefill([1, 2, 3]), provenance={HOSTILE: HOSTILE})


def assert_plain(text, lines=1):
    """Nothing in the text but printable characters and the line ends that belong to it."""
    assert text.replace("\n", "").isprintable() and text.count("\n") == lines - 1, ascii(text)


def test_an_artifact_describes_its_provenance_in_one_line(artifact):
    assert ESCAPED in str(artifact).splitlines()[-1]
    assert_plain(str(artifact), len(dataclasses.replace(artifact, provenance={"a": "b"}).__str__().splitlines()))
    assert_plain(repr(artifact))


def test_a_pin_of_a_foreign_artifact_is_described_in_one_line_a_field():
    pin = pin_lib.Pin({HOSTILE: HOSTILE, "list": [HOSTILE]})
    assert_plain(str(pin), 3)
    assert_plain(repr(pin))


def test_a_pin_mismatch_lists_foreign_fields_in_one_line_each(artifact):
    pin = pin_lib.Pin({**artifact.pin.document, HOSTILE: HOSTILE})
    with pytest.raises(kg.PinMismatch) as caught:
        tiny.engine().graft(dataclasses.replace(artifact, pin=pin))
    assert_plain(str(caught.value), 3)
    assert str(caught.value).count(ESCAPED) >= 1
    assert_plain(str(caught.value.differences[0]))


@pytest.mark.parametrize("kind", [errors.IntegrityError, errors.StorageError, errors.InputError, errors.TokenizerError])
def test_errors_stand_in_one_line(kind):
    assert_plain(str(kind(*([HOSTILE] * (3 if kind is errors.IntegrityError else 1)))))


def test_errors_that_list_things_keep_their_own_lines_alone():
    assert_plain(str(errors.TensorsError(HOSTILE, [HOSTILE, HOSTILE], "Do this.")), 4)
    assert_plain(str(errors.DeterminismError("line\n\x1bline")), 2)
    refused = {1: errors.InputError(HOSTILE), 4: errors.CapacityError(HOSTILE)}
    lines = str(errors.BatchError(refused)).splitlines()
    assert lines == ["2 sequence(s) cannot be run, by index:", f"  1: {ESCAPED}", f"  4: {ESCAPED}"]


@pytest.mark.parametrize(
    "error",
    [
        errors.IntegrityError("id", "field", HOSTILE),
        errors.PinMismatch("id", [errors.FieldDifference("field", 1, pin_lib.MISSING)]),
        errors.TensorsError("found", ["one", "two"], "Do this."),
        errors.InputError(HOSTILE),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_reach_the_parent_of_a_worker(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_what_is_wrong_with_each_sequence_reaches_the_parent_too():
    error = errors.BatchError({2: errors.CapacityError(HOSTILE), 5: errors.InputError("empty")})
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.BatchError and str(copy) == str(error)
    told = {index: (type(one), str(one)) for index, one in copy.errors.items()}
    assert told == {2: (errors.CapacityError, ESCAPED), 5: (errors.InputError, "empty")}


CALLS = {
    "a URI": lambda artifact: kg.load_model(HOSTILE),
    "a style of chat": lambda artifact: kg.load_model(f"hf:x?chat={HOSTILE}"),
    "a file": lambda artifact: kg.load_model(f"gguf:{HOSTILE}"),
    "a directory": lambda artifact: kg.load_artifact(HOSTILE, "0" * 64),
    "an id": lambda artifact: kg.load_artifact(".", HOSTILE),
    "a policy": lambda artifact: dataclasses.replace(artifact, policy=HOSTILE),
    "provenance": lambda artifact: dataclasses.replace(artifact, provenance={HOSTILE: 1.5}),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_a_caller_gives_is_shown_escaped(artifact, call):
    with pytest.raises(kg.KVGraftError) as caught:
        call(artifact)
    assert_plain(str(caught.value))
    assert r"a\nb\r" in str(caught.value)


def test_shown_is_printable_and_short():
    assert errors.shown(HOSTILE) == f"'{ESCAPED}'"
    assert errors.shown("x" * 200) == "'" + "x" * 92 + "..."
    assert errors.printable("plain é") == "plain é"
