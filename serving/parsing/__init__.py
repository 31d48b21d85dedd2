"""Between the text that a model writes and the messages of a chat: reasoning, content and tool calls.

    template text -> formats    which marks this model writes: detected from its chat template, never from its name
    answer text   -> parser     pieces as they become certain: Reasoning, Content, ToolCall
    tools, tool_choice  -> tools, forced    checked, and a grammar that makes the model write a call in its own format
    response_format     -> forced           the same for JSON answers

How the chat front uses it: `read_tools` checks what the client sent, `prompt_text` (jaxpd.text) renders the prompt,
`forced_calls` or `forced_answer` give the grammar, `marker_token_ids` the special tokens that must stay visible in the
text, and one parser a sample (`make_parser`) reads it, for a stream and for a whole answer alike.
"""

from serving.parsing.forced import forced_answer, forced_calls
from serving.parsing.formats import marker_token_ids
from serving.parsing.parser import make_parser
from serving.parsing.pieces import Content, Parser, Piece, Reasoning, ToolCall
from serving.parsing.tools import Tools, read_tools

__all__ = [
    "Content",
    "Parser",
    "Piece",
    "Reasoning",
    "ToolCall",
    "Tools",
    "forced_answer",
    "forced_calls",
    "make_parser",
    "marker_token_ids",
    "read_tools",
]
