"""Grammars in EBNF mean what their own rules say, whatever language they are translated to."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, strategies as st

from tests.unit.structured.grammar_parts import COMPILER, accepts, compile_grammar, follows
from trio_engine.errors import RequestError
from trio_engine.structured.ebnf import ebnf_to_lark
from trio_engine.structured.ebnf_parser import MAX_DEPTH
from trio_engine.structured.lark import OPTIONS

SQL = """
    root ::= select_statement

    select_statement ::= "SELECT " column " from " table " where " condition

    column ::= "col_1 " | "col_2 "
    table ::= "table_1 "
        | "table_2 "   # on a line of its own
    condition ::= column "= " number
    number ::= "1 " | "2 "
"""

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


def test_the_usual_grammars_are_taken() -> None:
    assert accepts("SELECT col_1  from table_2  where col_2 = 1 ", grammar=SQL)
    assert not accepts("SELECT col_1  from table_3 ", grammar=SQL)
    grammar = compile_grammar(grammar=JSON)
    assert follows(grammar, '{"a": [1, -2.5e+1, {"b": "\\u00e9\\n"}], "c": null}')
    assert not follows(grammar, '{"a": [1,}')
    assert not follows(grammar, '{"a": 01}')


@pytest.mark.parametrize(
    ("rule", "text", "other"),
    [
        ('"a" [0-9]{2,3}', "a12", "a1"),
        ('"a"{2}', "aa", "aaa"),
        ('("x" | "yz"){2,}', "xyzx", "x"),
        ("[^a-c]", "d", "b"),
        ("[^a]", "\n", "a"),
        (r"[\]\-\\^]", "]", "a"),
        (r"[a\-z]", "-", "b"),
        (r"[+--]", "-", "."),
        ("[-a]", "-", "b"),
        (r"[\u4e00-\u9fa5]", "中", "a"),
        (r"[\U0001F600-\U0001F64F]", "😀", "a"),
        (r"'it\'s' [&~/\x41]", "it'sA", "it'sB"),
        (r'"\"\\\n/"', '"\\\n/', '"'),
        ('"two\nlines"', "two\nlines", "two"),
        (".", "\n", ""),
        ('""', "", "a"),
        ("", "", "a"),
        ('"a" | ', "", "b"),
        ('[a-z]+ "ing"', "singing", "sing1"),
        ('"a"* "ab"', "aaab", "aaa"),
    ],
)
def test_a_rule_means_what_it_says(rule: str, text: str, other: str) -> None:
    grammar = compile_grammar(grammar=f"root ::= {rule}\n")
    assert follows(grammar, text)
    assert not follows(grammar, other)


@pytest.mark.parametrize(
    ("grammar", "text", "other"),
    [
        ('root ::= "(" root ")" | "x"', "((x))", "((x)"),
        ('root ::= root "+" [0-9]+ | [0-9]+', "1+22+3", "1+"),
        ('root ::= a\na ::= "a" b?\nb ::= "b" a | "c"', "abac", "aa"),
        # Names that differ in their case or in a dash only.
        ('root ::= my-rule myRule my_rule\nmyRule::="1"\nmy-rule::="2"\nmy_rule::="3"', "213", "2"),
        ('a ::= "x"\r\nroot ::= a\r\n  | "y"\r\n', "y", "z"),
        ("root ::= (root)* | 'a'", "a", "b"),
        ('root ::= ("[" root "]" | [a-c]+ | "-"){1,2}', "[-]ab", "[]"),
        ('root ::= x # no more\nx ::= "#" # sign', "#", "x"),
    ],
)
def test_rules_may_use_each_other(grammar: str, text: str, other: str) -> None:
    assert accepts(text, grammar=grammar)
    assert not accepts(other, grammar=grammar)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('start ::= "a"', "there is no rule root"),
        ('root ::= "a"\nroot ::= "b"', "line 2: rule root is there twice"),
        ("root ::= a b\nb ::= [x]", "line 1: there is no rule a"),
        ('root ::= ("a"', "line 1: a group is not closed"),
        ('root ::= "a")', "line 1: expected a rule, got ')'"),
        ('root ::= "a"**', "line 1: unexpected '*'"),
        ("root ::= +", "line 1: unexpected '+'"),
        ('root ::= "a', "line 1: cannot read '\"a'"),
        ("root ::= []", "line 1: a class must not be empty"),
        ("root ::= [z-a]", "line 1: z-a is no range"),
        ('\nroot ::= "a"{3,2}', "line 2: {3,2} allows nothing"),
        (r'root ::= "\ud800"', r"line 1: \ud800 is no character"),
        (r'root ::= "\U00110000"', r"line 1: \U00110000 is no character"),
        ("root ::= " + "(" * 100 + '"a"' + ")" * 100, f"groups nest more than {MAX_DEPTH} deep"),
        ("root ::= ::= a", "line 1: unexpected '::='"),
        ("root = a", "line 1: cannot read '= a'"),
        ("root a", "line 1: expected a rule, got 'root'"),
    ],
)
def test_what_is_no_grammar_is_refused_by_its_line(grammar: str, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        ebnf_to_lark(grammar)


def test_the_deepest_groups_that_are_taken_compile() -> None:
    for inside in ('"a"', 'root | "a"'):
        groups = "(" * MAX_DEPTH + inside + ")" * MAX_DEPTH
        COMPILER.compile(ebnf_to_lark(f"root ::= {groups}") + OPTIONS)


def test_a_long_chain_of_rules_takes_time_in_proportion() -> None:
    """Seen by counting: each rule is looked at once, however they use each other."""
    chain = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(2000))
    lark = ebnf_to_lark(f'root ::= r0\n{chain}\nr2000 ::= "x"')
    assert len(lark) < 60_000


# Regular rules only, so that a regular expression can be the oracle.
_ATOMS = st.sampled_from([('"a"', "a"), ('"bc"', "bc"), ("[a-b]", "[a-b]"), ("[^a]", "[^a]")])


def _combined(inner: st.SearchStrategy[tuple[str, str]]) -> st.SearchStrategy[tuple[str, str]]:
    signs = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{1,}"])
    several = st.lists(inner, min_size=2, max_size=3)
    return st.one_of(
        st.tuples(inner, signs).map(lambda x: (f"({x[0][0]}){x[1]}", f"(?:{x[0][1]}){x[1]}")),
        several.map(lambda x: (" ".join(a for a, _ in x), "".join(b for _, b in x))),
        several.map(
            lambda x: (f"({' | '.join(a for a, _ in x)})", f"(?:{'|'.join(b for _, b in x)})")
        ),
    )


@given(
    rule=st.recursive(_ATOMS, _combined, max_leaves=5),
    texts=st.lists(st.text("abc", max_size=6), min_size=3, max_size=6),
)
def test_regular_rules_agree_with_a_regular_expression(
    rule: tuple[str, str], texts: list[str]
) -> None:
    ebnf, regex = rule
    grammar = compile_grammar(grammar=f"root ::= {ebnf}")
    for text in texts:
        assert follows(grammar, text) == (re.fullmatch(regex, text) is not None), (ebnf, text)
