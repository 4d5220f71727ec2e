// Light and dark, and the colours of the style sheet for what is drawn on a canvas.

import { $ } from "./words.js";

const THEMES = ["system", "light", "dark"], KEPT = "foretick.theme";
const COLOURS = ["text", "dim", "line", "accent", "warn", "good", "bad"];
const CHOICES = 6;

// The button goes through the themes; `changed()` is called with every change, the system's too.
export function themed(changed) {
  const button = $("theme");
  let theme = localStorage.getItem(KEPT) || "system";
  const apply = () => {
    document.documentElement.dataset.theme = theme;
    button.textContent = `colours: ${theme}`;
    changed();
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem(KEPT, theme);
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  apply();
}

export function colours() {
  const probe = document.body.appendChild(document.createElement("i"));
  const read = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const found = Object.fromEntries(COLOURS.map((name) => [name, read(name)]));
  found.choices = Array.from({ length: CHOICES }, (_, n) => read(`choice-${n}`));
  probe.remove();
  return found;
}
