"""The grammar: distributions as text, its errors, and what it refuses to execute."""

import inspect
import math

import numpy as np
import pytest
import torch

import hardneg as hn
from hardneg.core.schedules import adaptive, constant, cosine, exponential, linear, registered_schedules, steps
from hardneg.negatives.grammar import read_expression

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
        ("Tlit(1.0)", r"'Tlit' is not known. Did you mean Tilt\? Known: .*Uniform"),
        ("OtherLabels() * Tilt(1.0)", r"Did you mean OtherLabel\?"),
        ("Tilt(liner(1.0, 0.0))", r"'liner' is not known. Did you mean linear\?"),
        ("Zebra(1.0)", r"^'Zebra' is not known. Known: "),
        ("Tilt(Zebra(1.0))", r"^'Zebra' is not known. Known inside of brackets: adaptive, constant.*, steps\.$"),
        ("Tilt()", "Tilt: missing a required argument: 'beta'; it takes beta, detach=False"),
        ("Tilt(linear(1.0))", r"linear: missing a required argument: 'end'; .* as in linear\(1\.0, 0\.1\)\.$"),
        (
            "Tilt(gamma=1.0)",
            r"^Tilt: got an unexpected keyword argument 'gamma'; it takes beta, detach=False, source=None, "
            r"by='score', as in Tilt\(1\.0\)\.$",
        ),
        ("Tilt(1.0, beta=1.0)", "^Tilt: multiple values for argument 'beta'; it takes beta, detach=False"),
        ("Uniform(1.0)", r"^Uniform: too many positional arguments; it takes no arguments, as in Uniform\(\)\.$"),
        ("Tilt(1.0", "is not an expression like"),
        ("", r"^'' is not an expression like 'OtherLabel\(\) \* Tilt\(1\.0\)': it is empty\.$"),
        ("Tilt(1.0) *", "is not an expression like"),
        ("import os", "is not an expression like"),
        ("x = Tilt(1.0)", "is not an expression like"),
        ("Tilt(1.0); Tilt(2.0)", "is not an expression like"),
        ("Tilt", r"Tilt needs brackets in 'Tilt': write Tilt\(1.0\)"),
        ("OtherLabel * Tilt(1.0)", "OtherLabel needs brackets"),
        ("1.0", "parse needs a distribution such as"),
        ("'Tilt(1.0)'", "parse needs a distribution such as"),
        ("linear(1.0, 0.0)", "parse needs a distribution such as"),
        ("Tilt(1.0) * 2.0", "'\\*' joins distributions"),
        ("2.0 * Tilt(1.0)", "'\\*' joins distributions"),
        ("Tilt(2.0 * 1.0)", "'\\*' joins distributions"),
        ("Tilt(1.0) * linear(1.0, 0.0)", "'\\*' joins distributions"),
        ("Tilt(1.0) + Tilt(2.0)", "is not part of the grammar"),
        ("Tilt(1.0) / Tilt(2.0)", "is not part of the grammar"),
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
        ("Tilt([1.0])", "is not part of the grammar"),
        ("Tilt(*[1.0])", "is not part of the grammar"),
        ("Tilt(**{'beta': 1.0})", "is not part of the grammar"),
        ("Tilt(beta)", "'beta' in 'Tilt\\(beta\\)' is not part of the grammar"),
        ("Tilt(-1.0)", "Tilt needs beta in"),
        ("Tilt(1.0) if True else Tilt(2.0)", "is not part of the grammar"),
        ("Tilt(f'{1}')", "is not part of the grammar"),
        ("Hardening('cubic')", "Hardening needs a function or one of"),
    ],
)
def test_errors_say_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        hn.parse(text)


def test_unknown_names_list_what_fits_there():
    """Distributions outside of brackets, schedules inside."""
    with pytest.raises(ValueError, match="Known: ") as outside:
        hn.parse("Zebra()")
    with pytest.raises(ValueError, match="Known inside of brackets: ") as inside:
        hn.parse("Tilt(Zebra())")
    listed = [{*str(error.value).rstrip(".").split(": ")[1].split(", ")} for error in (outside, inside)]
    assert listed == [{*hn.registered_negatives()}, {*registered_schedules()}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "arm(foo=2)",
            r"^arm: got an unexpected keyword argument 'foo'; it takes beta=1\.0, name='x', as in arm\(\)\.$",
        ),
        ("ram()", r"^'ram' is not known\. Did you mean arm\? Known: arm, free\.$"),
        ("arm(liner(1.0, 0.0))", r"^'liner' is not known\. Did you mean linear\? Known inside of brackets: linear\.$"),
        ("free(1, 2)", r"^free: not today; write it like free\(\)\.$"),
        ("", r"^'' is not an expression like 'arm\(\)': it is empty\.$"),
        ("arm() + arm()", r"use calls with plain values, such as 'arm\(\)'\.$"),
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
    with pytest.raises(ValueError, match=r"is not part of the grammar|is not known"):
        hn.parse(text)


def test_a_repeated_keyword_is_refused():
    with pytest.raises(ValueError, match="beta"):
        hn.parse("Tilt(beta=1.0, beta=2.0)")


@pytest.mark.parametrize("text", ["Rank(1.5)", "Rank(0, 2.5)", "Tilt(1.0, detach='no')", "From(3)", "Tilt('1.0')"])
def test_arguments_of_the_wrong_kind_are_refused(text):
    with pytest.raises(ValueError, match=text.split("(")[0]):
        hn.parse(text)


def test_the_number_of_arguments_is_reported_in_words():
    with pytest.raises(ValueError, match=r"^Rank: .*takes") as error:
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
    with pytest.raises(ValueError, match=r"cannot be written as text: .*register_hardening"):
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
    with pytest.raises(ValueError, match="cannot be written as text"):
        hn.negatives.to_text(q * hn.Tilt(1.0))


def test_every_registered_distribution_gives_an_example_that_reads_back():
    for name, cls in hn.registered_negatives().items():
        for text in cls.examples or (f"{name}()",):
            q = hn.parse(text)
            assert type(q) is cls
            assert hn.parse(hn.negatives.to_text(q)) == q
