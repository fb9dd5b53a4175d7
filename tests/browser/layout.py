"""What is wrong with the layout of a page, as the browser has laid it out."""

from __future__ import annotations

from playwright.sync_api import Page

_CUT = """() => {
  const wrong = [];
  const visible = at => at.checkVisibility({visibilityProperty: true, opacityProperty: true});
  for (const at of document.querySelectorAll('body *')) {
    const box = at.getBoundingClientRect();
    if (at.closest('svg, .skip, .unseen, thead, option, bdo') || !visible(at) || !box.width || !box.height) continue;
    if (box.right > innerWidth + 1 || box.left < -1) wrong.push(['outside', at]);
    const style = getComputedStyle(at);
    const hides = style.overflowX !== 'visible' && !['INPUT', 'TEXTAREA', 'SELECT'].includes(at.tagName);
    if (hides && at.scrollWidth > at.clientWidth + 1) wrong.push(['cut', at]);
  }
  return wrong.map(([what, at]) => `${what}: <${at.tagName} class="${at.className}"> ${at.innerText?.slice(0, 60)}`);
}"""


def overflow(page: Page) -> bool:
    """Return whether the page can be scrolled sideways."""
    page.wait_for_load_state()  # else its style may be missing
    return page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")


def cut_off(page: Page) -> list[str]:
    """Return the elements that reach out of the window, or whose content is cut at an edge."""
    page.wait_for_load_state()
    return page.evaluate(_CUT)
