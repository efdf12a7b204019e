
// Finds studies, attacks and defences that hold all words of the query; the index stands in the page.
const field = document.getElementById("query");
const list = document.getElementById("found");
const count = document.getElementById("count");
const root = document.body.dataset.root;
const plain = text => text.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();
const index = JSON.parse(document.getElementById("index").textContent).map(entry => ({
  ...entry, title: plain(entry.name), text: plain(Object.values(entry).join(" ")),
}));
const rank = (entry, words) => words.reduce((sum, word) =>
  sum + (entry.title === word ? 4 : entry.title.startsWith(word) ? 3 : entry.title.includes(word) ? 2 : 0), 0);
const item = entry => {
  const row = document.createElement("li"), link = document.createElement("a");
  const kind = document.createElement("small"), line = document.createElement("span");
  link.href = root + entry.address;
  link.textContent = entry.name;
  kind.textContent = entry.kind;
  line.textContent = entry.line;
  row.append(link, kind, line);
  return row;
};
const search = () => {
  const words = plain(field.value).split(/\s+/).filter(Boolean);
  const found = words.length ? index.filter(entry => words.every(word => entry.text.includes(word))) : [];
  found.sort((a, b) => rank(b, words) - rank(a, words));
  list.replaceChildren(...found.slice(0, 12).map(item));
  count.textContent = words.length ? `${found.length || "no"} ${found.length === 1 ? "page" : "pages"}` : "";
};
const close = () => { field.value = ""; search(); field.focus(); };
field.addEventListener("input", search);
document.addEventListener("keydown", event => {
  const links = [...list.querySelectorAll("a")], stops = [field, ...links], at = stops.indexOf(document.activeElement);
  if (event.key === "/" && !event.target.closest("input")) { field.focus(); }
  else if (event.key === "Escape" && at >= 0) { close(); }
  else if (event.key === "Enter" && at === 0 && links.length) { links[0].click(); }
  else if (event.key === "ArrowDown" && at >= 0) { (stops[at + 1] || stops[0]).focus(); }
  else if (event.key === "ArrowUp" && at > 0) { stops[at - 1].focus(); }
  else { return; }
  event.preventDefault();
});
document.querySelector("search").hidden = false;
search();
