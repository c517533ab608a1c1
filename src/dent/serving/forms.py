"""The parts of a multipart form.

They are taken apart by python-multipart, which FastAPI uses too: it gives back the bytes of a part as
they came. The standard library's `email` takes bodies for text and makes an object of every line, which
of ten megabytes of line ends makes hundreds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dent.serving.limits import Limits, Refused, check_count

MAX_BOUNDARIES = 1000  # in a body; parts are far fewer, and each that is none of a part is slow to pass
NO_FORM = "expected a form of several parts, got what cannot be read as one"


@dataclass
class Part:
    """One part: what it says that it is, if it says so, and its bytes."""

    content_type: str = ""
    content: bytearray = field(default_factory=bytearray)


def read_form(body: bytes, content_type: str, limits: Limits) -> list[Part]:
    """The parts of a form, at least one and no more than there may be images."""
    try:
        from python_multipart.exceptions import FormParserError
        from python_multipart.multipart import MultipartParser, parse_options_header
    except ImportError as error:
        raise ImportError(
            "serving reads forms by python-multipart: pip install 'dent-defense[serve]'"
        ) from error
    _, options = parse_options_header(content_type.encode("latin-1", "replace"))
    if not (boundary := options.get(b"boundary")):
        raise Refused(400, "expected multipart/form-data with its boundary, got none")
    if body.count(b"\r\n--" + boundary) > MAX_BOUNDARIES:
        raise Refused(400, f"{NO_FORM}: its boundary is all over it")
    collected = _Collected(limits)
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": collected.begin,
                "on_header_begin": collected.begin_header,
                "on_header_field": collected.name,
                "on_header_value": collected.value,
                "on_header_end": collected.end_header,
                "on_part_data": collected.data,
                "on_end": collected.end,
            },
        )
        parser.write(body)
    except FormParserError as error:
        raise Refused(400, NO_FORM) from error
    if not collected.ended:
        raise Refused(400, f"{NO_FORM}: it is cut off")
    if not collected.parts:
        raise Refused(422, "expected files in the form, got none")
    return collected.parts


class _Collected:
    """What the parser found so far; of the headers, the type."""

    def __init__(self, limits: Limits) -> None:
        self.parts: list[Part] = []
        self.ended = False
        self._limits = limits
        self._header: tuple[bytearray, bytearray] = bytearray(), bytearray()

    def begin(self) -> None:
        check_count(len(self.parts) + 1, self._limits)
        self.parts.append(Part())

    def begin_header(self) -> None:
        self._header = bytearray(), bytearray()

    def name(self, data: bytes, start: int, end: int) -> None:
        self._header[0].extend(data[start:end])

    def value(self, data: bytes, start: int, end: int) -> None:
        self._header[1].extend(data[start:end])

    def end_header(self) -> None:
        name, value = self._header
        if name.lower() == b"content-type":
            self.parts[-1].content_type = value.decode("latin-1")

    def data(self, data: bytes, start: int, end: int) -> None:
        self.parts[-1].content.extend(data[start:end])

    def end(self) -> None:
        self.ended = True
