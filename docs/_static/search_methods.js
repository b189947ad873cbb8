// The cheatsheet's table shows the rows that hold all the words in the field above it.
const field = document.querySelector("#method-search");
if (field) {
  const rows = [...document.querySelectorAll("#method-search ~ * tbody tr, #method-search ~ table tbody tr")];
  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  };
  field.addEventListener("input", show);
  show(); // the browser may have kept what was typed
}
