// Only in the pages that `fedfrozen watch` serves: asks that server whether there is something new.
const folded = () => [...document.querySelectorAll("details")];
const keyOf = (details) => details.querySelector("summary").textContent.split("(")[0];

async function refresh() {
  const badge = document.querySelector(".live");
  try {
    const answer = await fetch(location.pathname + "?after=" + document.body.dataset.version);
    if (answer.status === 200) {
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      const open = new Set(folded().filter((details) => details.open).map(keyOf));
      document.title = fresh.title;
      for (const part of ["header", "main", "#data"]) {
        document.querySelector(part).replaceWith(fresh.querySelector(part));
      }
      document.body.dataset.version = fresh.body.dataset.version;
      for (const details of folded()) details.open = open.has(keyOf(details));
      mount();
    }
    badge.textContent = answer.ok ? "Live: this page follows the run." : "The folder cannot be read now.";
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    badge.textContent = "fedfrozen watch has ended: this is what it showed last.";
  }
  setTimeout(refresh, 2000);
}
setTimeout(refresh, 2000);
