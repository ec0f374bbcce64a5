"""What can be computed of how a page looks: contrast, focus, width, text alternatives. WCAG 2.2, level AA."""

from typing import Any

TEXT, LARGE_TEXT, PARTS = 4.5, 3.0, 3.0  # least contrast: 1.4.3 for text, 1.4.11 for what shows focus

COLOURS = """
const channel = (value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) =>
  0.2126 * channel(r / 255) + 0.7152 * channel(g / 255) + 0.0722 * channel(b / 255);
const contrast = (one, other) => {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
};
const parsed = (text) => {
  const found = (text.match(/[0-9.]+/g) || []).map(Number);
  return text === "transparent" ? [0, 0, 0, 0] : [...found.slice(0, 3), found.length > 3 ? found[3] : 1];
};
const over = (top, below) => [0, 1, 2].map((at) => top[at] * top[3] + below[at] * (1 - top[3]));
const behind = (node) => {  // the colour that is painted behind an element
  const layers = [];
  for (let at = node; at; at = at.parentElement) layers.push(parsed(getComputedStyle(at).backgroundColor));
  const dark = matchMedia("(prefers-color-scheme: dark)").matches
    && getComputedStyle(document.documentElement).colorScheme.includes("dark");
  const canvas = dark ? [18, 18, 18] : [255, 255, 255];
  return layers.reverse().reduce((below, layer) => over(layer, below), canvas);
};
"""

LOW_CONTRAST = (
    "(least) => {"
    + COLOURS
    + """
const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const text = walker.currentNode.textContent.trim(), node = walker.currentNode.parentElement;
  if (!text || !node.checkVisibility() || node.closest("title, option")) continue;
  const style = getComputedStyle(node), size = parseFloat(style.fontSize);
  const colour = parsed(node.closest("svg") ? style.fill : style.color), below = behind(node);
  const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
  const value = contrast(over(colour, below), below);
  if (value < (isLarge ? least.large : least.text)) found.push(`${value.toFixed(2)}: ${text.slice(0, 60)}`);
}
return found;
}"""
)

# Of the element that has the focus: why it cannot be seen that it has.
UNSEEN_FOCUS = (
    "(least) => {"
    + COLOURS
    + """
const node = document.activeElement;
if (node === document.body) return null;
const style = getComputedStyle(node), name = node.textContent.trim().slice(0, 40) || node.name;
const box = node.getBoundingClientRect();
if (box.right <= 0 || box.left >= innerWidth || box.bottom <= 0 || box.top >= innerHeight)
  return `${name}: outside the window`;
if (style.outlineStyle === "none" || parseFloat(style.outlineWidth) < 2) return `${name}: no outline`;
const below = behind(node.parentElement), value = contrast(over(parsed(style.outlineColor), below), below);
return value < least ? `${name}: outline of contrast ${value.toFixed(2)}` : "";
}"""
)

WITHOUT_TEXT = """() => [...document.querySelectorAll("img, svg")].filter((node) =>
  node.getAttribute("aria-hidden") !== "true" &&
  !(node.getAttribute("role") === "img" && node.getAttribute("aria-label")) &&
  !node.getAttribute("alt")).map((node) => node.outerHTML.slice(0, 80))"""

WITHOUT_LABEL = """() => [...document.querySelectorAll("input:not([type=hidden]), select, textarea")]
  .filter((node) => !node.labels.length && !node.getAttribute("aria-label")).map((node) => node.name)"""

CUT_OFF = """() => [...document.querySelectorAll("main *, header *")].filter((node) =>
  node.checkVisibility() && !node.closest(".scroll, svg, .skip") &&
  (node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).display !== "inline" ||
   node.getBoundingClientRect().right > innerWidth + 1)).map((node) => node.outerHTML.slice(0, 80))"""


def low_contrast(page: Any) -> list[str]:
    """Texts that are too pale, with their contrast."""
    return page.evaluate(LOW_CONTRAST, {"text": TEXT, "large": LARGE_TEXT})


def unseen_focus(page: Any, most: int = 80) -> list[str]:
    """Controls where the keyboard's focus cannot be seen, by going through all of them with the tabulator."""
    problems, steps = [], 0
    if not page.locator("a, button, input, select, textarea").count():  # as the last page, which says goodbye
        return []
    page.evaluate("document.activeElement.blur()")
    for _ in range(most):
        page.keyboard.press("Tab")
        if (problem := page.evaluate(UNSEEN_FOCUS, PARTS)) is None:
            if steps:
                break
            continue  # the focus was in the browser's own controls
        steps += 1
        problems += [problem] if problem else []
    assert steps >= 1, "no control can be reached with the keyboard"
    return problems


def problems_of(page: Any) -> list[str]:
    """Everything that can be computed, as lines."""
    sideways = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return [
        *(f"contrast {line}" for line in low_contrast(page)),
        *(f"focus {line}" for line in unseen_focus(page)),
        *(f"no text for {line}" for line in page.evaluate(WITHOUT_TEXT)),
        *(f"no label for {line}" for line in page.evaluate(WITHOUT_LABEL)),
        *(f"cut off {line}" for line in page.evaluate(CUT_OFF)),
        *([f"{sideways} pixels wider than the window"] if sideways else []),
    ]
