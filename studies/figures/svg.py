"""A drawing as SVG text: boxes, arrows and token chips in one style, the same bytes each time."""

from __future__ import annotations

from dataclasses import dataclass, field
from xml.sax.saxutils import escape

SANS = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
INK, MUTED, LINE, PAPER = "#1f2937", "#6b7280", "#cbd5e1", "#ffffff"
STYLES = {
    "root": ("#e2e8f0", "#475569", INK),
    "draft": ("#dbeafe", "#3b82f6", INK),
    "accepted": ("#dcfce7", "#16a34a", INK),
    "bonus": ("#fef3c7", "#d97706", INK),
    "rejected": ("#f8fafc", "#cbd5e1", "#94a3b8"),
    "context": ("#f1f5f9", "#94a3b8", MUTED),
}
"""Fill, outline and text of a chip or box."""
CHIP_HEIGHT, CHARACTER = 28, 8.4
"""Pixels of a chip and of one character in it."""


@dataclass
class Drawing:
    """An SVG picture of `width` x `height` pixels on white paper."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: int = 13,
        color: str = MUTED,
        anchor: str = "start",
        mono: bool = False,
        bold: bool = False,
    ) -> None:
        """A line of text whose baseline is at y."""
        font = MONO if mono else SANS
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-family="{font}" font-size="{size}" fill="{color}" text-anchor="{anchor}"'
            f'{weight} xml:space="preserve">{escape(text)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, style: str, dashed: bool = False) -> None:
        """A rounded rectangle."""
        fill, stroke, _ = STYLES[style]
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{stroke}"'
            f' stroke-width="1.5"{dash}/>'
        )

    def chip(
        self, x: float, y: float, token: str, style: str = "draft", number: int | None = None, dashed: bool = False
    ) -> float:
        """A token in a box whose middle is at height y, with its row's number; the x of its right edge."""
        label = "" if number is None else f"{number} "
        width = (len(token) + len(label)) * CHARACTER + 18
        self.box(x, y - CHIP_HEIGHT / 2, width, CHIP_HEIGHT, style, dashed)
        color = STYLES[style][2]
        if label:
            self.text(x + 9, y + 5, label, 14, MUTED, mono=True)
        self.text(x + 9 + len(label) * CHARACTER, y + 5, token, 14, color, mono=True)
        return x + width

    def curve(self, path: str, color: str = MUTED) -> None:
        """A curve; `path` as in SVG's `d`."""
        self.parts.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')

    def arrow(self, path: str, color: str = MUTED) -> None:
        """A curve with a head at its end."""
        self.parts.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.5" marker-end="url(#head)"/>')

    def cell(self, x: float, y: float, size: float, fill: str) -> None:
        """A square of a matrix."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{size:g}" height="{size:g}" fill="{fill}" stroke="{LINE}"/>'
        )

    def bar(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """A filled rectangle without outline."""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"/>')

    def svg(self) -> str:
        """The file's text."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}"'
            f' height="{self.height}" role="img">\n<title>{escape(self.title)}</title>\n'
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
            f' orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{MUTED}"/></marker></defs>\n'
            f'<rect width="{self.width}" height="{self.height}" rx="10" fill="{PAPER}"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"
