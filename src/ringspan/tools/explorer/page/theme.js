// The theme of the documentation site, which furo keeps in localStorage under "theme": auto, light or dark.

const NAMES = { auto: "as the system", light: "light", dark: "dark" };
const SIGNS = { auto: "◐", light: "○", dark: "●" };

export function setUpTheme(button) {
  const show = (theme) => {
    document.documentElement.dataset.theme = theme;
    button.textContent = SIGNS[theme];
    button.setAttribute("aria-label", `Theme: ${NAMES[theme]}`);
  };
  const stored = localStorage.getItem("theme");
  show(stored in NAMES ? stored : "auto");
  button.addEventListener("click", () => {
    const names = Object.keys(NAMES);
    const next = names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length];
    localStorage.setItem("theme", next);
    show(next);
  });
}
