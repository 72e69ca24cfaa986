// Tables whose columns sort: the rows of a method stay together. Without scripts they keep their order.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const bodies = [...table.tBodies];
  const units = bodies.length > 1 ? bodies : [...bodies[0].rows];
  const parent = bodies.length > 1 ? table : bodies[0];
  const cell = (unit, column) => (unit.rows ? unit.rows[0] : unit).cells[column].textContent.trim();
  const number = (text) => Number.parseFloat(text.replace("\u2212", "-"));
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const rises = head.getAttribute("aria-sort") !== "ascending";
      for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", rises ? "ascending" : "descending");
      const numeric = units.some((unit) => !Number.isNaN(number(cell(unit, column))));
      const compare = (a, b) => {
        if (!numeric) return a.localeCompare(b);
        const [x, y] = [number(a), number(b)];
        if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
        return rises ? x - y : y - x;
      };
      const sorted = [...units].sort((a, b) => compare(cell(a, column), cell(b, column)));
      if (!numeric && !rises) sorted.reverse();
      parent.append(...sorted);
    });
  });
}
