"""Text to tokens and back: tokenizers, incremental decoding, chat templates and stop strings of a bundle."""

from distir_relax.text.chat_template import ChatTemplate, Message
from distir_relax.text.incremental_decoder import IncrementalDecoder
from distir_relax.text.stop_strings import StopStrings
from distir_relax.text.tokenizer import Tokenizer, text_files

__all__ = ["ChatTemplate", "IncrementalDecoder", "Message", "StopStrings", "Tokenizer", "text_files"]
