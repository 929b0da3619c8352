// Ranks the site's search: Sphinx gives all pages with a word in any heading the same score.
// Sphinx names this object; the numbers but for `score` are its defaults.
// eslint-disable-next-line no-unused-vars
var Scorer = {
  score: ([page, title, , , score]) => {
    const query = (new URLSearchParams(location.search).get("q") || "").trim().toLowerCase();
    const words = query.replace(/^-+/, "").split(/[\s-]+/).filter(Boolean);
    const heading = title.toLowerCase();
    const share = words.filter((word) => heading.includes(word)).length / (words.length || 1);
    const isOption = /^-*[a-z]+(-[a-z]+)+$/.test(query) && page.endsWith("reference/options");
    const folder = { start: 3, tutorials: 2, "how-to": 3, reference: 2 }[page.split("/")[1]] || 0;
    return score + 20 * share + folder + (isOption ? 30 : 0) - (page.startsWith("docs/") ? 0 : 4);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
