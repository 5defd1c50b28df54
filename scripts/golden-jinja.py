#!/usr/bin/env python3
"""Writes tests/golden/jinja/cases.jsonl.gz: what Python's Jinja2 makes of many small templates.

Needs `pip install transformers==5.19.0 jinja2==3.1.6`, nothing else; the environment is the one in which transformers renders
chat templates. Every case is a template and its variables, with the text or with `null` where Jinja2 raises an error.
"""

import gzip
import itertools
import json
import pathlib

import jinja2
import transformers
from transformers.utils.chat_template_utils import _compile_jinja_template

VALUES = [
    "", "abc", " a  b ", "\x1ctab\t\x1f", "Äö ΣΑΣ ß ŉ", "a\nb\r\nc\x0bd", "a,b,,c", "x" * 40, "<b>&'\"/", "12", "tRUE", "é\u00a0", "\u2028x",
    0, 1, -3, 7, 2.5, -0.5, 1000.0, 0.1, True, False, None,
    [], [1, 2, 3], ["b", "a", "C"], [[1], [2]], [None, True, "x"], [{"a": 1, "b": "x"}, {"a": 2}],
    {}, {"b": 1, "A": 2, "c": None}, {"items": [1], "x": {"y": "z"}, "keys": "k"}, {"é": "ü", "a": 1.5},
]
FILTERS = [
    "tojson", "trim", "trim('a ')", "length", "count", "string", "list", "dictsort", "default('d')", "default('d', true)", "d(1)", "first", "last",
    "items", "join", "join(', ')", "lower", "upper", "replace('a', 'xy')", "replace('', '-')", "reverse", "map('upper')", "map(attribute='a')", "select",
    "reject", "selectattr('a')", "rejectattr('a')", "selectattr('a', 'equalto', 1)", "rejectattr('a', 'defined')", "capitalize", "title", "int", "float",
    "abs", "round", "sort", "unique", "sum", "min", "max", "safe", "e", "escape", "indent", "wordcount", "batch(2)", "slice(2)", "pprint", "groupby('a')",
    "tojson(indent=2)", "tojson(ensure_ascii=True)", "tojson(separators=(',', ':'))", "tojson(sort_keys=True)", "tojson(2)", "urlencode", "striptags",
    "attr('a')", "select('string')", "select('equalto', 'a')", "format(1)", "center(9)", "truncate(9)", "xmlattr", "random is defined", "split", "lines", "bool",
]
TESTS = [
    "defined", "undefined", "none", "boolean", "true", "false", "number", "integer", "float", "string", "mapping", "sequence", "iterable", "callable",
    "odd", "even", "eq 1", "equalto 'abc'", "ne 1", "in [1, 'abc']", "not none", "lower", "upper", "sameas none", "divisibleby 2", "gt 1", "lt 1", "escaped",
]
METHODS = [
    "upper()", "lower()", "strip()", "lstrip()", "rstrip()", "strip('a ')", "lstrip('a')", "rstrip('\\n')", "strip(none)", "split()", "split(',')",
    "split(',', 1)", "split(none)", "split(none, 1)", "split('')", "rsplit(',', 1)", "rsplit(',')", "rsplit()", "splitlines()", "replace('a', 'b')",
    "replace('a', 'b', 1)", "replace('', 'x')", "startswith('a')", "startswith(('a', 'x'))", "startswith('')", "endswith('c')", "endswith(('c', ''))", "find('b')",
    "find('')", "find('b', 1)", "rfind('b')", "count('a')", "count('')", "title()", "capitalize()", "isdigit()", "isnumeric()", "isalpha()", "isalnum()",
    "isspace()", "islower()", "isupper()", "isascii()", "join(['x', 'y'])", "join([1])", "format(1)", "removeprefix('a')", "removesuffix('c')", "zfill(5)",
    "ljust(5)", "casefold()", "swapcase()", "encode()", "index('b')", "partition(',')", "keys()", "values()", "items()", "get('b')", "get('q')", "get('q', 5)",
    "get('items')", "pop('b')", "copy()", "update({})", "append(1)", "insert(0, 1)", "count(1)", "index(1)", "a", "b", "x", "x.y", "items", "keys", "q", "q.r",
]
SUBSCRIPTS = ["[0]", "[-1]", "[5]", "[1:]", "[:1]", "[::-1]", "[-2:]", "[1:2]", "[::2]", "['b']", "['items']", "['q']", "[0][0]", "['x']['y']", "[none]", "[0:0]"]
OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "and", "or"]
PAIRS = [
    "", "abc", "b", 0, 1, -3, 7, 2.5, True, False, None, [], [1, 2], ["b"], {}, {"b": 1},
]

# Whole constructs: scoping, loops, macros, white space, and what real chat templates do.
TEMPLATES = [
    "{% for x in v %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }} {% endfor %}",
    # Of lists only: kvlb does not know the end of a loop over the letters of a text, and no chat template has one.
    "{% for x in v if v is not string %}{{ loop.length }}{{ loop.revindex0 }}{{ loop.last }} {% endfor %}",
    "{% for x in [1, 2, 3] %}{{ loop.length }}{{ loop.revindex }}{{ loop.revindex0 }} {% endfor %}",
    "{% for x in [1, 2, 3] | map('string') %}{{ loop.length }}{{ loop.revindex }}{{ loop.last }} {% endfor %}",
    "{% for x in [1, 2, 3] | select %}{{ loop.length }}{{ loop.last }} {% endfor %}",
    "{% for x in [1, 2, 3][1:] %}{{ loop.length }}{{ loop.revindex0 }}{{ loop.last }} {% endfor %}",
    "{% for x in [1, 2] + [3] %}{{ loop.length }}{{ loop.revindex0 }}{{ loop.last }} {% endfor %}",
    "{% for x in [3, 1] | reverse %}{{ loop.length }}{{ loop.revindex0 }}{{ loop.last }} {% endfor %}",
    "{% for k, x in {'a': 1, 'b': 2}.items() %}{{ loop.length }}{{ loop.revindex }}{{ loop.last }} {% endfor %}",
    "{% for x in {'a': 1, 'b': 2}.values() %}{{ loop.length }}{{ loop.last }}{{ x }} {% endfor %}",
    "{% for x in {'a': 1, 'b': 2}.keys() %}{{ loop.length }}{{ loop.last }}{{ x }} {% endfor %}",
    "{% for x in range(2) %}{{ loop.length }}{{ loop.revindex }} {% endfor %}",
    "{% for x in v %}{{ loop.previtem is defined }}{{ loop.nextitem is defined }}{{ loop.changed(x) }}{{ loop.cycle('a', 'b') }} {% endfor %}",
    "{% for x in v if x %}{{ loop.index }}:{{ loop.length }} {% else %}none{% endfor %}",
    "{% for x in v %}{% if loop.index == 2 %}{% break %}{% endif %}{{ loop.index }}{% endfor %}",
    "{% for x in v %}{% if loop.first %}{% continue %}{% endif %}{{ loop.index }}{% endfor %}",
    "{% for k, i in v.items() %}{{ k }}={{ i }};{% endfor %}",
    "{% for k in v %}{{ k }};{% endfor %}",
    "{% for k, i in v | items %}{{ k }}{% endfor %}",
    "{% for k, i in v | dictsort %}{{ k }}={{ i }};{% endfor %}",
    "{% set x = 1 %}{% for i in [1, 2] %}{% set x = i %}{% endfor %}{{ x }}",
    "{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}",
    "{% set ns = namespace(x=0, y='') %}{% for i in [1, 2, 3] %}{% set ns.x = ns.x + i %}{% set ns.y = ns.y ~ i %}{% endfor %}{{ ns.x }}{{ ns.y }}",
    "{% set ns = namespace() %}{{ ns.q is defined }}{% set ns.q = none %}{{ ns.q is none }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}",
    "{% set x %}  block {{ 1 + 1 }} {% endset %}[{{ x }}]{{ x | trim }}",
    "{% macro f(a, b=2, *args) %}{{ a }}{{ b }}{{ args | length }}{% endmacro %}{{ f(1) }}{{ f(1, 3) }}{{ f(b=5, a=4) }}",
    "{% macro f(a, b='d') -%}\n  {{ a }}-{{ b }}\n{%- endmacro %}{{ f('x') }}{{ f(b='y', a='z') }}",
    "{% macro f() %}{{ x }}{% endmacro %}{% set x = 1 %}{{ f() }}",
    "{% set x = 1 %}{% macro f() %}{{ x }}{% endmacro %}{% set x = 2 %}{{ f() }}",
    "{% macro f() %}{{ w }}{% endmacro %}{% for w in [1, 2] %}{{ f() }}{% endfor %}",
    "{% macro f() %}{{ v }}{% endmacro %}{{ f() }}",
    "{% macro f(x) %}{% set y = x %}{{ y }}{% endmacro %}{{ f(1) }}{{ y is defined }}",
    "{% macro f(x) %}{{ x }}{% if x > 0 %}{{ f(x - 1) }}{% endif %}{% endmacro %}{{ f(3) }}",
    "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}G{% endmacro %}{{ f() }}",
    "{% macro f(x) %}{{ caller(x) }}{% endmacro %}{% call(y) f(1) %}[{{ y }}]{% endcall %}",
    "{% macro f(x) %}a{{ x }}{% endmacro %}{% set r = f(1) %}{{ r }}{{ r | length }}{{ r ~ 'x' }}{{ r + 'y' }}",
    "{% set ns = namespace(n=0) %}{% macro f() %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endmacro %}{{ f() }}{{ f() }}{{ ns.n }}",
    "{% macro f(x) %}{{ x }}{{ kwargs | length }}{% endmacro %}{{ f(1, q=2) }}",
    "{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ a is defined }}",
    "{% filter upper %}abc{{ 'x' }}{% endfilter %}",
    "{% raw %}{{ x }}{% endraw %}",
    "a{# comment #}b\n{# line #}\nc",
    "  {% if true %}\n  x\n  {% endif %}\n  y",
    "a {%- if true %} b {%- endif %} c",
    "a {%+ if true %} b {% endif -%} c\n",
    "  {{- 'x' -}}  y\n\n{{ 'z' }}\n",
    "{% if true -%}\n   a\n{%- else -%} b {%- endif %}\n\n",
    "x\n",
    "x\n\n",
    "\n{% set a = 1 %}\n\n{{ a }}\n",
    "a\r\nb{% if true %}\r\nc{% endif %}\r\n",
    "\t{% if true %}\n\t{{ 'a' }}\n\t{% endif %}",
    "    {# c #}\n  {{ 1 }}",
    "{{ 'a\\nb\\t\\'\\\"\\\\ \\u00e9 \\x41' }}",
    "{{ \"it's\" }}{{ 'a' 'b' }}",
    "{{ 1_000 }}{{ 0x1f }}{{ 1.5e3 }}{{ -2 ** 2 }}{{ 7 // 2 }}{{ -7 // 2 }}{{ -7 % 3 }}{{ 7 / 2 }}{{ 4 / 2 }}",
    "{{ 'a' if true }}{{ 'a' if false }}{{ 'a' if false else 'b' }}",
    "{{ ('a' if false) is defined }}",
    "{{ 1 < 2 < 3 }}{{ 1 < 3 < 2 }}{{ not 1 == 2 }}{{ not true and false }}",
    "{{ 'a' in 'abc' and 'x' not in 'abc' }}{{ 'k' in {'k': 1} }}{{ 1 in [1] }}",
    "{{ true }}{{ True }}{{ none }}{{ None }}{{ false }}",
    "{{ [1, 'a', None, true] }}",
    "{{ {'a': 1} }}",
    "{{ (1, 2) }}",
    "{{ 'x' ~ 1 ~ none ~ true ~ 1.0 }}",
    "{{ 'x' ~ [1] }}",
    "{{ [1, 2] ~ '' }}",
    "{{ ['a'] | string }}",
    "{{ ['a', ['b']] | join }}",
    "{{ undefined_thing }}|{{ undefined_thing is defined }}|{{ undefined_thing | default('d') }}|{{ undefined_thing | length }}",
    "{{ undefined_thing.x }}",
    "{{ undefined_thing ~ 'x' }}{{ undefined_thing == none }}{{ undefined_thing == undefined_other }}",
    "{{ undefined_thing + 'x' }}",
    "{% for x in undefined_thing %}a{% else %}b{% endfor %}",
    "{% for x in none %}a{% endfor %}",
    "{{ undefined_thing in [1] }}{{ 1 in undefined_thing }}",
    "{{ undefined_thing | tojson }}",
    "{{ not undefined_thing }}{{ undefined_thing and 1 }}{{ undefined_thing or 2 }}",
    "{{ undefined_thing | list | length }}{{ undefined_thing | join }}{{ undefined_thing | upper }}{{ undefined_thing | trim }}|",
    "{{ range(3) | list | tojson }}{{ range(1, 7, 2) | list | tojson }}{{ range(3, 0, -1) | list | tojson }}{{ range(0) | length }}",
    "{{ range(5)[-1] }}{{ range(5)[1:3] | list | tojson }}{{ 3 in range(5) }}",
    "{{ range(200000) | length }}",
    "{{ range(3) }}",
    "{{ dict(a=1, b='x') | tojson }}{{ dict(a=1).a }}",
    "{{ dict([('a', 1)]) | tojson }}",
    "{{ namespace(a=1).a }}",
    "{{ joiner is defined }}{{ cycler is defined }}{{ lipsum is defined }}",
    "{{ raise_exception('no') }}",
    "{{ 'abc' | first }}{{ 'abc' | last }}{{ [] | first is defined }}{{ 'abc'[0] }}{{ 'abc'[-1] }}{{ 'abc'[1:] }}{{ 'äöü'[1:] }}{{ 'abc'[9] is defined }}",
    "{{ ('a,b' | replace(',', ';')).split(';') | last }}",
    "{{ v[0].a }}{{ v[0]['a'] }}{{ v[0].get('a') }}{{ v[-1].a }}",
    "{{ (v | selectattr('a', 'equalto', 2) | list)[0].a }}",
    "{{ v | selectattr('a') | list | length }}",
    "{{ v | map(attribute='a') | join(',') }}{{ v | map(attribute='b', default='-') | join(',') }}",
    "{{ v | map('tojson') | join(',') }}",
    "{{ v | tojson(indent=4) }}",
    "{{ (v + v) | length }}{{ (v + v)[-1] | tojson }}{{ (v + [1])[1:] | tojson }}",
    "{{ v[1:] | tojson }}{{ v[::-1] | tojson }}{{ v[:-1] | length }}{{ (v | reverse | list) | tojson }}",
    "{{ v is string }}{{ v is mapping }}{{ v is sequence }}{{ v is iterable }}{{ v is number }}{{ v is none }}",
    "{% if v is string %}s{% elif v is mapping %}m{% elif v is iterable %}i{% endif %}",
    "{% if v %}t{% else %}f{% endif %}{{ v == v }}{{ v != v }}",
    "{% do v %}",
    "{% set v2 = v %}{{ v2 | tojson }}",
    "{{ v.items }}",
    "{{ v.items is defined }}{{ v.keys is defined }}{{ v['keys'] is defined }}",
    "{{ v.__class__ }}",
    "{{ v | tojson | safe }}",
    "{{ ('<' | safe) ~ '<' }}",
    "{{ ('<' | safe) + '<' }}",
    "{{ '%s' % 'a' }}",
    "{{ '%s-%d' | format('a', 3) }}",
    "{{ 'a' * 3 }}{{ [1] * 2 }}",
    "{{ 10000000000000000000 + 1 }}{{ 2 ** 70 }}",
    "{{ 1e16 }}{{ 1e-5 }}{{ 123456789.123456789 }}{{ 0.1 + 0.2 }}{{ 1e15 }}",
    "{{ (0.1 + 0.2) ~ '' }}{{ 3.0 | int }}{{ '3' | int }}{{ 'x' | int }}{{ 3.7 | round }}",
    "{{ 'a' < 'b' }}{{ 'a' < 1 }}",
    "{{ [1, 2] < [1, 3] }}{{ [1] == [1] }}{{ {'a': 1} == {'a': 1} }}{{ 1 == 1.0 }}{{ true == 1 }}{{ '1' == 1 }}{{ none == false }}",
    "{% generation %}a{{ 1 }}{% endgeneration %}b",
    "{%- generation -%} a {%- endgeneration -%} b",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "{% for m in [1, 2] %}{% generation %}{{ m }}{{ loop.index }}{% endgeneration %}{% endfor %}",
    "{% block a %}x{% endblock %}",
    "{% autoescape true %}{{ '<' }}{% endautoescape %}",
    "{% set content = 'a</think>b' %}{{ content.split('</think>')[-1].lstrip('\\n') }}{{ content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] }}",
    "{% set c = '  x ' %}{{ c.strip() }}|{{ c | trim }}|{{ c.rstrip() }}|",
    "{{ (v ~ '') | length }}{{ 'a' in v ~ '' }}",
    "{{ v is defined and v['items'] is defined }}{% if v['items'] %}t{% endif %}",
    "{{ 'items' in v }}{{ v.get('items') is none }}",
    "{{ v | unique | list | length }}",
    "{% for x in v | sort %}{{ x }}{% endfor %}",
    "{{ (v | map('upper') | list)[0] }}{{ v | map('length') | list | tojson }}",
    "{{ v | select('in', ['a', 1]) | list | tojson }}",
    "{{ v | reject('none') | list | tojson }}",
    "{{ v | map('string') | join('|') }}",
    "{{ (v | last).a is defined }}{{ (v | first).b is defined }}",
    "{{ '' if not v else v | length }}",
    "{{ v is not none and v | length > 0 }}",
    "{{ strftime_now is defined }}",
    "{% if strftime_now is defined %}d{% endif %}",
    "{{ self is defined }}{{ loop is defined }}{{ caller is defined }}",
    "{{ x.y.z if x is defined and x.y is defined else 'n' }}",
    "{%- set a = [] -%}{%- for i in [1, 2] -%}{%- set a = a + [i] -%}{%- endfor -%}{{ a | length }}",
    "{% set ns = namespace(a=[]) %}{% for i in [1, 2] %}{% set ns.a = ns.a + [i] %}{% endfor %}{{ ns.a | tojson }}",
    "{{ 'x'.join(['a', 'b']) }}{{ ', '.join(v | map('string')) }}",
    "{% set t = ('a', 'b') %}{{ t[0] }}{{ t | length }}{{ t | tojson }}{{ 'a' in t }}",
    "{{ [[1, 2], [3]] | sum(start=[]) }}",
    "{% for a in [1, 2] %}{% for b in [3, 4] %}{{ loop.index }}{{ loop.depth is defined }}{% endfor %}{{ loop.index }}{% endfor %}",
    "{% for x in [[1, [2]], [3]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}",
    "{{ {'a': {'b': [1, {'c': 'd'}]}}.a.b[1].c }}{{ {'a': 1}['a'] }}{{ {'a': 1}.b is defined }}",
    "{{ none | default('d') }}{{ none | default('d', true) }}{{ '' | default('d', boolean=true) }}",
    "{{ 'a-b_c d' | title }}{{ 'hELLO wORLD' | capitalize }}{{ 'x' | upper }}",
    "{{ messages | length }}{{ messages[0].role }}{{ messages[-1]['content'] }}{{ messages[0].name is defined }}",
    "{{ tools is none }}{{ documents is none }}{{ tools is defined }}{{ add_generation_prompt }}",
]


def cases():
    for template in TEMPLATES:
        if "v" in template:
            for value in VALUES:
                yield template, {"v": value}
        else:
            yield template, {}
    for value in VALUES:
        for name in FILTERS:
            yield "{{ v | " + name + " }}", {"v": value}
            yield "{{ (v | " + name + ") | list | tojson }}", {"v": value}
        for name in TESTS:
            yield "{{ v is " + name + " }}", {"v": value}
        for name in METHODS:
            yield "{{ v." + name + " }}", {"v": value}
            yield "{{ v." + name + " | list | tojson }}", {"v": value}
            yield "{{ (v." + name + ") | tojson }}", {"v": value}
        for name in SUBSCRIPTS:
            yield "{{ v" + name + " }}", {"v": value}
            yield "{{ (v" + name + ") | tojson }}", {"v": value}
        yield "{{ v }}", {"v": value}
        yield "{{ -v }}{{ not v }}", {"v": value}
        yield "{{ v ~ '' }}{{ '' ~ v }}", {"v": value}
    for left, right in itertools.product(PAIRS, PAIRS):
        for operator in OPERATORS:
            yield "{{ v " + operator + " w }}", {"v": left, "w": right}
            yield "{{ (v " + operator + " w) | tojson }}", {"v": left, "w": right}


def render(template, variables):
    messages = [{"role": "user", "content": "hi"}]
    try:
        text = _compile_jinja_template(template).render(messages=messages, tools=None, documents=None, add_generation_prompt=True, **variables)
        text.encode()
        # The place in memory of a method is no text that a prompt could share.
        return None if " at 0x" in text else text
    except Exception:  # whatever Jinja2 raises, the engine refuses the request
        return None


def main():
    target = pathlib.Path(__file__).parent.parent / "tests/golden/jinja/cases.jsonl.gz"
    lines = [json.dumps({"jinja2": jinja2.__version__, "transformers": transformers.__version__})]
    for template, variables in cases():
        lines.append(json.dumps({"template": template, "variables": variables, "text": render(template, variables)}))
    target.write_bytes(gzip.compress("\n".join(lines).encode() + b"\n", mtime=0))
    print(len(lines) - 1, "cases,", target.stat().st_size, "bytes")


main()
