"""The grammar: distributions as text, its errors, and what it refuses to execute."""

import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hardneg as hn
from hardneg.core.errors import GrammarError, HardnegError, UnknownName
from hardneg.core.schedules import adaptive, constant, cosine, exponential, linear, registered_schedules, steps
from hardneg.negatives.grammar import TooLong, read_expression
from support.errors import raises

READ = {
    "Uniform()": hn.Uniform(),
    "  Tilt(1)\n": hn.Tilt(1),
    "Tilt(beta=2.5, detach=True, source='mined')": hn.Tilt(2.5, True, "mined"),
    "Threshold(-0.25)": hn.Threshold(-0.25),
    "Ring(0.1, dynamic_inner=True)": hn.Ring(0.1, 1.0, True),
    "Rank(2)": hn.Rank(2),
    "Rank(0, stop=None)": hn.Rank(0),
    "BelowPositive(absolute=-1e-3)": hn.BelowPositive(None, -0.001),
    'Hardening("sigmoid", 3.0)': hn.Hardening("sigmoid", 3.0),
    'From("queue")': hn.From("queue"),
    "OtherLabel() * SameCluster() * Tilt(1.0)": hn.OtherLabel() * hn.SameCluster() * hn.Tilt(1.0),
    "OtherLabel() * (SameCluster() * Tilt(1.0))": hn.OtherLabel() * hn.SameCluster() * hn.Tilt(1.0),
    "Tilt(linear(1.0, 0.0))": hn.Tilt(linear(1.0, 0.0)),
    "Tilt(linear(1.0, end=0.0, steps=7, inclusive=True))": hn.Tilt(linear(1.0, 0.0, 7, True)),
    "Ring(cosine(0.0, 0.2), steps(1.0, 0.1, num_changes=3))": hn.Ring(cosine(0.0, 0.2), steps(1.0, 0.1, 3)),
    "Threshold(exponential(-0.3, 0.1, decay=2.0))": hn.Threshold(exponential(-0.3, 0.1, 2.0)),
    "Ring(constant(0.0), adaptive(1.0, 0.1, rate=0.05))": hn.Ring(constant(0.0), adaptive(1.0, 0.1, 0.05)),
}


@pytest.mark.parametrize("text", READ)
def test_text_is_read_and_written_back(text):
    q = hn.parse(text)
    assert q == READ[text]
    assert hn.parse(repr(q)) == q
    assert hn.negatives.to_text(q) == repr(q)
    assert hash(hn.parse(repr(q))) == hash(q)


def test_different_numbers_are_different_distributions():
    assert hn.parse("Tilt(1.0)") != hn.parse("Tilt(1.5)")
    assert hn.parse("Tilt(1.0) * OtherLabel()") != hn.parse("OtherLabel() * Tilt(1.0)")
    assert hn.parse("Tilt(linear(1.0, 0.0))") != hn.parse("Tilt(cosine(1.0, 0.0))")


def test_defaults_are_not_written():
    assert repr(hn.Ring(0.0, 1.0) * hn.Tilt(1.0, detach=False)) == "Ring() * Tilt(1.0)"
    assert repr(hn.Tilt(1.0, source="mined")) == "Tilt(1.0, source='mined')"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "Tlit(1.0)",
            r"'Tlit' is not known. Did you mean Tilt\? It takes beta, .*\. Known: .*Uniform",
        ),
        ("OtherLabels() * Tilt(1.0)", r"Did you mean OtherLabel\?"),
        ("Tilt(liner(1.0, 0.0))", r"'liner' is not known. Did you mean linear\?"),
        ("Zebra(1.0)", r"^'Zebra' is not known. Known: "),
        ("Tilt(Zebra(1.0))", r"^'Zebra' is not known. Known inside brackets: adaptive, constant.*, steps\.$"),
        ("Tilt()", "Tilt needs beta, got none; it takes beta, detach=False"),
        ("Tilt(linear(1.0))", r"linear needs end, got none; .* as in linear\(1\.0, 0\.1\)\.$"),
        (
            "Tilt(gamma=1.0)",
            r"^Tilt needs known arguments, got gamma; it takes beta, .*, by='score', as in Tilt\(1\.0\)\.$",
        ),
        ("Tilt(1.0, beta=1.0)", "^Tilt needs each argument once, got beta twice; it takes beta, detach=False"),
        (
            "Uniform(1.0)",
            r"^Uniform needs at most 0 arguments without a name, got 1; it takes no arguments, as in Uniform\(\)\.$",
        ),
        ("Tilt(1.0", "needs an expression like"),
        ("", r"needs an expression like 'OtherLabel\(\) \* Tilt\(1\.0\)', got '' \(it is empty\)\.$"),
        ("Tilt(1.0) *", "needs an expression like"),
        ("import os", "needs an expression like"),
        ("x = Tilt(1.0)", "needs an expression like"),
        ("Tilt(1.0); Tilt(2.0)", "needs an expression like"),
        ("Tilt", r"Tilt needs brackets, got 'Tilt'; write Tilt\(1.0\)"),
        ("OtherLabel * Tilt(1.0)", "OtherLabel needs brackets"),
        ("1.0", "parse needs a distribution such as"),
        ("'Tilt(1.0)'", "parse needs a distribution such as"),
        ("linear(1.0, 0.0)", "parse needs a distribution such as"),
        ("Tilt(1.0) * 2.0", "'\\*' needs distributions on both sides"),
        ("2.0 * Tilt(1.0)", "'\\*' needs distributions on both sides"),
        ("Tilt(2.0 * 1.0)", "'\\*' needs distributions on both sides"),
        ("Tilt(1.0) * linear(1.0, 0.0)", "'\\*' needs distributions on both sides"),
        ("Tilt(1.0) + Tilt(2.0)", "The grammar needs calls with plain values"),
        ("Tilt(1.0) / Tilt(2.0)", "The grammar needs calls with plain values"),
        ("Tilt(OtherLabel())", r"Tilt needs numbers and names as arguments, got OtherLabel\(\); join with '\*'"),
        (
            "Tilt(beta=OtherLabel() * Tilt(1.0))",
            r"Tilt needs numbers and names as arguments, got OtherLabel\(\) \* Tilt",
        ),
        (
            "Tilt(linear(linear(1.0, 0.0), 0.0))",
            r"linear needs numbers as arguments, got the schedule linear\(1.0, 0.0\)",
        ),
        (
            "Tilt(linear(1.0, end=constant(0.0)))",
            r"linear needs numbers as arguments, got the schedule constant\(0.0\)",
        ),
        ("Tilt(linear(Tilt(1.0), 0.0))", "linear needs numbers and names as arguments"),
        ("Tilt([1.0])", "The grammar needs calls with plain values"),
        ("Tilt(*[1.0])", "The grammar needs calls with plain values"),
        ("Tilt(**{'beta': 1.0})", "The grammar needs calls with plain values"),
        ("Tilt(beta)", "The grammar needs calls .*, got 'beta' in 'Tilt\\(beta\\)'"),
        ("BelowPositive(0.05, by=guide)", "got 'guide' in .*; write 'guide' if it is text"),
        ("Tlit", r"'Tlit' is not known. Did you mean Tilt\? It takes beta"),
        ("Tilt(-1.0)", "Tilt needs beta in"),
        ("Tilt(1.0) if True else Tilt(2.0)", "The grammar needs calls with plain values"),
        ("Tilt(f'{1}')", "The grammar needs calls with plain values"),
        ("Hardening('cubic')", "Hardening needs a function or one of"),
    ],
)
def test_errors_say_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        hn.parse(text)


def test_a_wrong_name_is_answered_with_the_nearest_and_its_arguments():
    with pytest.raises(UnknownName) as name:
        hn.parse("Tlit(1.0)")
    assert (name.value.name, name.value.nearest) == ("Tlit", "Tilt")
    assert name.value.usage.startswith("It takes beta, detach=False")
    assert set(name.value.known) == {*hn.registered_negatives()}
    with pytest.raises(GrammarError) as argument:
        hn.parse("Tilt(betta=1.0)")
    assert (argument.value.who, argument.value.got) == ("Tilt", "betta")
    assert argument.value.fix.startswith("did you mean beta? It takes beta, detach=False")


TOO_LARGE = {
    "500 factors": (" * ".join(["Tilt(1.0)"] * 500), "at most 100 factors"),
    "500 factors to the right": ("Tilt(1.0) * (" * 150 + "Tilt(1.0)" + ")" * 150, "at most 100 factors"),
    "500 sums": ("+".join("1" * 500), "at most 100 factors"),
    "nested calls": ("Tilt(" * 190 + "1" + ")" * 190, "at most 20 levels of nesting"),
    "nested keywords": ("Tilt(beta=" * 190 + "1" + ")" * 190, "at most 20 levels of nesting"),
    "nested minus": ("Tilt(" + "-" * 3000 + "1)", "at most 20 levels of nesting"),
    "nested not": ("not " * 2000 + "Tilt(1.0)", "at most 20 levels of nesting"),
    "nested lists": ("[" * 150 + "]" * 150, "at most 20 levels of nesting"),
    "attributes": ("Tilt" + ".x" * 3000, "at most 20 levels of nesting"),
    "subscripts": ("Tilt" + "[0]" * 3000, "at most 20 levels of nesting"),
    "4,000 digits": (f"Tilt({'9' * 4000})", "at most 18 digits"),
    "400 digits": (f"Rank(0, -{'9' * 400})", "at most 18 digits"),
    "a long text": (f"From('{'x' * 1_000_000}')", "at most 10,000 characters"),
    "1,000,000 factors": ("Tilt(1.0) * " * 1_000_000 + "Tilt(1.0)", "at most 10,000 characters"),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_is_too_large_names_the_limit(name):
    text, limit = TOO_LARGE[name]
    with pytest.raises(TooLong, match=limit) as error:
        hn.parse(text)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "text",
    [
        "Tilt(1e400)", "Tilt(-1e999)", "Tilt(" + "9" * 5000 + ")", "(" * 5000 + "Tilt(1.0)",
        "(" * 250 + "Tilt(1.0)" + ")" * 250,
        "Tilt(1j)", "Tilt(b'x')", "Tilt(...)", "Tilt(1.0)\x00", "\x00", "\ud800", "Tilt('\ud800'", "\x1b[2J",
        "Tilt(1.0)\x0c\x07",
        "'" * 5000, "lambda: " * 1000, "Tilt(" * 5000, "{" * 5000, "f'{" * 50, "Tilt(1_0" + "_0" * 4000 + ")",
    ],
)  # fmt: skip
def test_no_text_ends_in_another_error(text):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        hn.parse(text)
    assert isinstance(error.value, HardnegError)
    assert len(str(error.value)) < 600
    assert str(error.value).isprintable()


@given(st.text(max_size=60) | st.text("TiltRank()*-.,=[]{}'\"\\19e_ \n\x00", max_size=60))
def test_any_text_is_read_or_refused(text):
    try:
        assert isinstance(hn.parse(text), hn.negatives.Negatives)
    except HardnegError as error:
        assert str(error).isprintable()  # noqa: PT017


def test_the_largest_product_that_is_allowed_reads_back():
    q = hn.parse(" * ".join(["Tilt(0.5)"] * 100))
    assert hn.parse(hn.negatives.to_text(q)) == q
    with pytest.raises(TooLong):
        hn.negatives.to_text(q * q)


def test_unknown_names_list_what_fits_there():
    """Distributions outside of brackets, schedules inside."""
    with pytest.raises(ValueError, match="Known: ") as outside:
        hn.parse("Zebra()")
    with raises(UnknownName, name="Zebra") as inside:
        hn.parse("Tilt(Zebra())")
    listed = [{*error.value.known} for error in (outside, inside)]
    assert listed == [{*hn.registered_negatives()}, {*registered_schedules()}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "arm(foo=2)",
            r"^arm needs known arguments, got foo; it takes beta=1\.0, name='x', as in arm\(\)\.$",
        ),
        ("ram()", r"^'ram' is not known\. Did you mean arm\? It takes beta=1\.0, .* Known: arm, free\.$"),
        (
            "arm(liner(1.0, 0.0))",
            r"'liner' is not known\. Did you mean linear\? .* Known inside brackets: linear\.$",
        ),
        ("free(1, 2)", r"^free needs valid arguments, got not today; it takes the options of free\(\)\.$"),
        ("", r"needs an expression like 'arm\(\)', got '' \(it is empty\)\.$"),
        ("arm() + arm()", r"needs calls with plain values, such as 'arm\(\)', got 'arm\(\) \+ arm\(\)'\.$"),
    ],
)
def test_other_names_have_the_same_errors(text, message):
    """Arms, batches and views are read alike; a wrapper passes its signature on."""

    def arm(*values, **options):
        return inspect.signature(made).bind(*values, **options)

    def made(beta=1.0, name="x"):
        return beta, name

    def free(*values):
        raise TypeError("not today")

    arm.__signature__ = inspect.signature(made)
    with pytest.raises(ValueError, match=message):
        read_expression(text, {"arm": arm, "free": free, "linear": linear})


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "().__class__.__bases__",
        "Tilt.__init__(1.0)",
        "Tilt(1.0).log_weights(None)",
        "Tilt((1.0).__abs__())",
        "Hardening(lambda s: s)",
        "(lambda: Tilt(1.0))()",
        "hn.Tilt(1.0)",
        "open('x')",
        "eval('1')",
        "[Tilt(1.0) for _ in range(2)][0]",
        "(q := Tilt(1.0))",
        "Tilt(1.0)[0]",
    ],
)
def test_nothing_is_executed(text):
    with pytest.raises(ValueError, match=r"needs calls with plain values|is not known"):
        hn.parse(text)


def test_an_expression_may_have_several_lines():
    text = "  OtherLabel()  # the labels of the data set\n  * Tilt(\n    1.0)  # harder\n"
    assert hn.parse(text) == hn.OtherLabel() * hn.Tilt(1.0)
    with pytest.raises(GrammarError):
        hn.parse("OtherLabel()\nTilt(1.0)")


def test_a_repeated_keyword_is_refused():
    with pytest.raises(ValueError, match="beta"):
        hn.parse("Tilt(beta=1.0, beta=2.0)")


@pytest.mark.parametrize("text", ["Rank(1.5)", "Rank(0, 2.5)", "Tilt(1.0, detach='no')", "From(3)", "Tilt('1.0')"])
def test_arguments_of_the_wrong_kind_are_refused(text):
    with pytest.raises(ValueError, match=text.split("(")[0]):
        hn.parse(text)


def test_the_number_of_arguments_is_reported_in_words():
    with raises(GrammarError, who="Rank", got="3") as error:
        hn.parse("Rank(1, 2, 3)")
    assert "Rank.takes" not in str(error.value)


@pytest.mark.parametrize("number", [1, 0.1, 1e-7, 1e22, 0.1 + 0.2, np.pi.real])
def test_numbers_are_written_exactly(number):
    assert hn.parse(repr(hn.Tilt(number))).beta == number


@pytest.mark.parametrize(
    "q", [hn.Threshold(-math.inf), hn.Threshold(math.inf), hn.Tilt(np.float64(1.5)), hn.Tilt(np.linspace(0, 1, 3)[1])]
)
def test_every_number_that_is_taken_can_be_written(q):
    assert hn.parse(repr(q)) == q


def test_a_function_works_and_says_that_it_cannot_be_written():
    q = hn.OtherLabel() * hn.Hardening(lambda s: 2.0 * s)
    z = torch.randn(4, 3)
    scores = hn.two_views(z, z, 0.5, labels=torch.arange(4))
    expected = (hn.OtherLabel() * hn.Tilt(2.0)).log_weights(scores)
    torch.testing.assert_close(q.log_weights(scores), expected)
    assert hn.ContrastiveLoss(q)(z, z, labels=torch.arange(4)) > 0
    with raises(ValueError, who="to_text", fix="register_hardening"):
        hn.negatives.to_text(q)


def test_a_registered_hardening_is_part_of_the_grammar():
    hn.negatives.register_hardening("cube in tests", lambda s, slope: slope * s**3)
    q = hn.parse("Hardening('cube in tests', 0.5)")
    assert hn.parse(hn.negatives.to_text(q)) == q
    scores = hn.score(torch.randn(2, 3), torch.randn(2, 3), torch.randn(5, 3), 1.0)
    torch.testing.assert_close(q.log_weights(scores), 0.5 * scores.candidates**3)


def test_judged_pairs_work_and_say_that_they_cannot_be_written():
    q = hn.Known(hn.negatives.KnownPairs(torch.tensor([0]), torch.tensor([2])))
    z = torch.randn(3, 4)
    scores = hn.cross_views(z, z, 0.5, ids=torch.arange(3))
    assert (q.log_weights(scores) != hn.NEVER).sum(-1).tolist() == [1, 2, 2]
    with raises(ValueError, who="to_text", got="Known(<1 pairs>) * Tilt(1.0)"):
        hn.negatives.to_text(q * hn.Tilt(1.0))


def test_every_registered_distribution_gives_an_example_that_reads_back():
    for name, cls in hn.registered_negatives().items():
        for text in cls.examples or (f"{name}()",):
            q = hn.parse(text)
            assert type(q) is cls
            assert hn.parse(hn.negatives.to_text(q)) == q
