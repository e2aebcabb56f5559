"""Stop strings across token boundaries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroot.router.stop import StopChecker, StopStrings


def run(chunks: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None, list[str]]:
    """Shown text, the stop string, and what each chunk showed."""
    checker = StopChecker(StopStrings(stops), include=include)
    shown: list[str] = []
    for chunk in chunks:
        shown.append(checker.push(chunk))
        if checker.matched is not None:
            return "".join(shown), checker.matched, shown
    return "".join(shown) + checker.flush(), None, shown


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Letter by letter: the first end at which some stop string ends, and the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@pytest.mark.parametrize(
    ("chunks", "stops", "text", "matched"),
    [
        (["hello ", "world"], ["world"], "hello ", "world"),
        (["a", "b", "c", "d"], ["bcd"], "a", "bcd"),
        (["abcx"], ["bcd"], "abcx", None),
        (["ab", "ab", "c"], ["abc"], "ab", "abc"),
        (["aa", "ab"], ["aab"], "a", "aab"),
        (["abcd"], ["abcde", "bc"], "a", "bc"),
        (["x\n", "\nUser:"], ["\n\nUser:", "\n\n"], "x", "\n\n"),
        (["xEND"], ["ND", "END"], "x", "END"),
        (["tail en"], ["end"], "tail en", None),
        (["日本", "語です"], ["本語"], "日", "本語"),
    ],
)
def test_where_it_stops(chunks: list[str], stops: list[str], text: str, matched: str | None) -> None:
    assert run(chunks, stops)[:2] == (text, matched)


def test_holds_back_no_more_than_needed() -> None:
    assert run(["one <", "/", "b> <", "/a", ">z"], ["</a>"])[2] == ["one ", "", "</b> ", "", ""]


def test_include() -> None:
    assert run(["ab", "cd", "ef"], ["cd"], include=True)[:2] == ("abcd", "cd")
    assert run(["abcdef"], ["cd"], include=True)[:2] == ("abcd", "cd")


letters = st.text(alphabet="ab", max_size=4)


@given(st.lists(letters, max_size=12), st.lists(letters.filter(bool), min_size=1, max_size=5), st.booleans())
def test_as_letter_by_letter(chunks: list[str], stops: list[str], include: bool) -> None:
    assert run(chunks, stops, include)[:2] == reference("".join(chunks), stops, include)


@given(st.lists(letters, max_size=12), st.lists(letters.filter(bool), min_size=1, max_size=5))
def test_shown_text_cannot_become_a_stop_string(chunks: list[str], stops: list[str]) -> None:
    checker = StopChecker(StopStrings(stops), include=False)
    seen = shown = ""
    for chunk in chunks:
        seen += chunk
        shown += checker.push(chunk)
        if checker.matched is not None:
            break
        held = seen[len(shown) :]
        assert seen == shown + held
        beginnings = [end for end in range(len(seen)) if any(stop.startswith(seen[end:]) for stop in stops)]
        assert held == (seen[beginnings[0] :] if beginnings else "")


def test_many_stop_strings() -> None:
    stops = [f"stop number {index}!" for index in range(2000)]
    assert run(["so stop", " number 19", "99! more"], stops)[:2] == ("so ", "stop number 1999!")
