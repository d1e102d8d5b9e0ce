// Returns what is wrong with the layout of the page as it is shown now, each fault as a sentence.
(() => {
  const SLACK = 1; // pixels that rounding may take
  const CUT_ON_PURPOSE = ".preview, .unseen"; // the begin of a body in a list; what only screen readers are told
  const CONTROLS = "a[href], button, input:not([type=hidden]), select, textarea, summary";
  const faults = [];

  function named(element) {
    const words = (element.textContent || element.getAttribute("aria-label") || element.name || "").trim().replace(/\s+/g, " ");
    return `<${element.tagName.toLowerCase()}${element.id ? ` id=${element.id}` : ""}> ${words.slice(0, 40)}`;
  }

  function isShown(element) {
    return element.checkVisibility({ visibilityProperty: true, opacityProperty: true }) && element.closest(CUT_ON_PURPOSE) === null;
  }

  // True when an element cuts what does not fit, and one cannot scroll to it.
  function cuts(element) {
    return ["hidden", "clip"].includes(getComputedStyle(element).overflowX);
  }

  // The parts of an element that can be seen without scrolling a box in the page.
  function seen(element) {
    return Array.from(element.getClientRects(), (part) => {
      const box = { left: part.left, top: part.top, right: part.right, bottom: part.bottom };
      for (let outer = element.parentElement; outer !== document.body && outer !== null; outer = outer.parentElement) {
        if (getComputedStyle(outer).overflowX === "visible") continue;
        const bounds = outer.getBoundingClientRect();
        box.left = Math.max(box.left, bounds.left);
        box.top = Math.max(box.top, bounds.top);
        box.right = Math.min(box.right, bounds.right);
        box.bottom = Math.min(box.bottom, bounds.bottom);
      }
      return box;
    }).filter((box) => box.right - box.left > SLACK && box.bottom - box.top > SLACK);
  }

  function overlap(one, other) {
    const wide = Math.min(one.right, other.right) - Math.max(one.left, other.left);
    const high = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
    return wide > SLACK && high > SLACK;
  }

  function checkText(node) {
    const element = node.parentElement;
    if (node.data.trim() === "" || element === null || !isShown(element)) return;
    const range = document.createRange();
    range.selectNodeContents(node);
    let block = element;
    while (getComputedStyle(block).display.startsWith("inline") && getComputedStyle(block).display !== "inline-block" && block.parentElement) block = block.parentElement;
    for (const line of range.getClientRects()) {
      for (let outer = element; outer !== document.body && outer !== null; outer = outer.parentElement) {
        if (["auto", "scroll"].includes(getComputedStyle(outer).overflowX)) break;
        const edge = outer.getBoundingClientRect();
        if (cuts(outer) && (line.right > edge.right + SLACK || line.left < edge.left - SLACK || line.bottom > edge.bottom + line.height / 2)) {
          faults.push(`text is cut in ${named(outer)}`);
          return;
        }
      }
      const bounds = block.getBoundingClientRect();
      const scrolls = ["auto", "scroll"].includes(getComputedStyle(block).overflowX);
      if (!scrolls && (line.right > bounds.right + SLACK || line.left < bounds.left - SLACK)) {
        faults.push(`text runs out of ${named(block)}`);
        return;
      }
    }
  }

  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) checkText(texts.currentNode);

  const controls = Array.from(document.querySelectorAll(CONTROLS)).filter(isShown).map((element) => ({ element, parts: seen(element) }));
  controls.forEach(({ element, parts }, number) => {
    for (const other of controls.slice(number + 1)) {
      if (element.contains(other.element) || other.element.contains(element)) continue;
      if (parts.some((one) => other.parts.some((two) => overlap(one, two)))) faults.push(`${named(element)} overlaps ${named(other.element)}`);
    }
  });

  for (const table of document.querySelectorAll("table")) {
    const heads = Array.from(table.querySelectorAll("thead th"), (head) => getComputedStyle(head).textAlign);
    for (const row of table.tBodies.length && heads.length && !table.classList.contains("u-legend") ? table.tBodies[0].rows : []) {
      const cells = Array.from(row.cells, (cell) => getComputedStyle(cell).textAlign);
      if (cells.join() !== heads.join()) {
        faults.push(`cells are not below their titles in ${named(row)}`);
        break;
      }
    }
  }

  const wide = document.documentElement.scrollWidth;
  if (wide > document.documentElement.clientWidth) faults.push(`${wide} pixels wide`);
  return faults;
})()
