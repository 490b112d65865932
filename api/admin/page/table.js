// Small pieces of the document: text that is set only where it differs, tables that keep their rows.

export const byId = (id) => document.getElementById(id);

export function say(node, text) {
  if (typeof node === "string") node = byId(node);
  if (node.textContent !== text) node.textContent = text;
}

export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// Columns are { head, title?, number?, key?, cell(row) }; a cell is text, or { text, bar } with a share of 0 to 1, or
// { text, kind } with a class. `sort`: { key, down, by(key) } where heads can be pressed.
export function fill(table, columns, rows, sort = null, nothing = "none") {
  heads(table.tHead, columns, sort);
  const body = table.tBodies[0];
  const wanted = rows.length ? rows : [null];
  while (body.rows.length > wanted.length) body.deleteRow(-1);
  wanted.forEach((row, index) => {
    const line = body.rows[index] ?? body.insertRow();
    if (row === null) {
      if (line.cells.length !== 1) line.replaceChildren(make("td", { className: "nothing", colSpan: columns.length }));
      say(line.cells[0], nothing);
      return;
    }
    if (line.cells.length !== columns.length || line.cells[0].className === "nothing") {
      line.replaceChildren(...columns.map(() => make("td")));
    }
    columns.forEach((column, at) => {
      const cell = column.cell(row);
      const node = line.cells[at];
      const plain = typeof cell === "object" ? cell : { text: cell };
      const kind = [column.number ? "number" : "", plain.kind ?? "", plain.bar === undefined ? "" : "bar"];
      const name = kind.filter(Boolean).join(" ");
      if (node.className !== name) node.className = name;
      if (plain.bar !== undefined) node.style.setProperty("--share", String(Math.min(Math.max(plain.bar, 0), 1)));
      say(node, String(plain.text));
      if (plain.title && node.title !== plain.title) node.title = plain.title;
    });
  });
}

function heads(head, columns, sort) {
  const names = columns.map((each) => each.head).join("\n");
  if (head.dataset.names !== names) {
    head.dataset.names = names;
    const cells = columns.map((column) => {
      const cell = make("th", { scope: "col", className: column.number ? "number" : "" });
      if (column.title) cell.title = column.title;
      if (column.key && sort) {
        const button = make("button", { type: "button" }, column.head);
        button.addEventListener("click", () => sort.by(column.key));
        cell.append(button);
      } else cell.append(column.head);
      return cell;
    });
    head.replaceChildren(make("tr", {}, ...cells));
  }
  columns.forEach((column, at) => {
    const sorted = sort && column.key === sort.key ? (sort.down ? "descending" : "ascending") : null;
    const cell = head.rows[0].cells[at];
    if (sorted) cell.setAttribute("aria-sort", sorted);
    else cell.removeAttribute("aria-sort");
  });
}

// A definition list of [term, text, title?].
export function define(list, pairs) {
  const names = pairs.map((each) => each[0]).join("\n");
  if (list.dataset.names !== names) {
    list.dataset.names = names;
    list.replaceChildren(
      ...pairs.map(([term, , title]) => make("div", title ? { title } : {}, make("dt", {}, term), make("dd"))),
    );
  }
  pairs.forEach(([, text], index) => say(list.children[index].lastChild, text));
}
