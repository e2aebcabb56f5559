"""Chat templates render as in transformers, and fail with words."""

from datetime import datetime
from typing import Any

import pytest

from warmroot.cluster.errors import ConfigError, InvalidRequestError
from warmroot.router.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say <b>\"hi\"</b> & 'bye' é"},
    {"role": "assistant", "content": "hi  "},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "é": "<&>"}}}]

TEMPLATES = {
    "chatml": (
        "{%- for message in messages %}\n  {%- if loop.first %}{{ bos_token }}{% endif %}\n"
        "<|{{ message.role }}|>\n{{ message['content'] }}{{ eos_token }}\n{%- endfor %}\n"
        "{% if add_generation_prompt %}\n<|assistant|>\n{% endif %}"
    ),
    "trims": "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n    {% endfor %}",
    "tools": "{% if tools %}{{ tools | tojson(indent=2) }}{{ tools | tojson }}{% endif %}{{ messages | tojson }}",
    "documents": "{% for d in documents %}{{ d.title }}: {{ d.text }}{% endfor %}{{ messages[0]['content'] }}",
    "generation": (
        "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %};"
        "{% if loop.index == 9 %}{% break %}{% endif %}{% endfor %}"
    ),
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "flags": "{{ 'think' if enable_thinking is defined and enable_thinking else 'plain' }}{{ messages | length }}",
}


def render(source: str, messages: list[dict[str, Any]] = TALK, **options: Any) -> str:
    return ChatTemplate(source, SPECIAL, lambda: datetime(2026, 11, 30, 12)).render(messages, **options)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": True}])
def test_as_transformers(name: str, add_generation_prompt: bool, variables: dict[str, Any]) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    documents = [{"title": "A", "text": "<x>"}]
    common = {"tools": TOOLS, "documents": documents, "add_generation_prompt": add_generation_prompt}
    expected, _ = utils.render_jinja_template([TALK], chat_template=TEMPLATES[name], **common, **SPECIAL, **variables)
    assert render(TEMPLATES[name], variables=variables, **common) == expected[0]


@pytest.mark.parametrize("name", ["chatml", "trims", "generation"])
def test_continue_final_message_as_transformers(name: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    expected, _ = utils.render_jinja_template(
        [TALK], chat_template=TEMPLATES[name], continue_final_message=True, **SPECIAL
    )
    text = render(TEMPLATES[name], add_generation_prompt=False, continue_final_message=True)
    assert text == expected[0]
    assert text.rstrip().endswith("hi")


def test_values() -> None:
    assert render(TEMPLATES["chatml"], TALK[:1]) == "<s><|system|>\nBe brief.</s><|assistant|>\n"
    assert render("{{ messages | tojson }}", [{"role": "user", "content": "<é>"}]) == (
        '[{"role": "user", "content": "<é>"}]'
    )
    assert render("{{ strftime_now('%d %b %Y') }}") == "30 Nov 2026"


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


def test_absent_fields_are_not_printed() -> None:
    messages = [{"role": "assistant", "content": "x", "tool_calls": None}]
    assert render("{{ messages[0].tool_calls is defined }}", messages) == "False"


@pytest.mark.parametrize(
    ("source", "messages", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", TALK, "roles must alternate"),
        ("{{ messages[0].content + 1 }}", TALK, "TypeError"),
        ("{{ messages[7].content.upper() }}", TALK, "refused"),
        ("{{ messages[0].__class__.__mro__ }}", TALK, "refused"),
        ("{{ messages.append(1) }}", TALK, "refused"),
        ("x", [], "must not be empty"),
        ("x", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
    ],
)
def test_refusals(source: str, messages: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        render(source, messages)
    assert caught.value.param == "messages"


def test_final_message_that_is_not_shown() -> None:
    with pytest.raises(InvalidRequestError, match="final message"):
        render("nothing", add_generation_prompt=False, continue_final_message=True)


def test_contradiction() -> None:
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        render("x", continue_final_message=True)


def test_a_broken_template_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError) as caught:
        render("{% for %}")
    assert caught.value.param == "--chat-template"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * [1] }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ ' ' * width }}",
        "{% include '/etc/passwd' %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_what_a_template_must_not_do_is_refused_at_once(source):
    """Templates come with models, and their variables from clients: neither reaches Python, files or all memory."""
    template = ChatTemplate(source, {}, now=datetime.now)
    with pytest.raises(InvalidRequestError) as caught:
        template.render([{"role": "user", "content": "x"}], variables={"width": 10**12})
    assert caught.value.param == "messages"


def test_what_clients_write_is_never_a_template():
    template = ChatTemplate("{{ messages[0].content }}{{ extra }}", {}, now=datetime.now)
    text = template.render([{"role": "user", "content": "{{ 7 * 7 }}"}], variables={"extra": "{% raw %}"})
    assert text == "{{ 7 * 7 }}{% raw %}"


def test_products_of_a_sane_size_are_made():
    template = ChatTemplate("{{ '=' * 20 }}{{ 3 * 4 }}{{ 2.5 * 2 }}", {}, now=datetime.now)
    assert template.render([{"role": "user", "content": "x"}]) == "=" * 20 + "12" + "5.0"
