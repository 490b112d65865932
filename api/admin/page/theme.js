// Before anything is drawn: light or dark, where somebody chose it here; else as the system has it. And a word for
// browsers that do not run the page: it is written in the language of browsers since 2024.
"use strict";
(() => {
  try {
    const theme = localStorage.getItem("kvslot-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Storage may be shut; then the system decides.
  }
  setTimeout(() => {
    if (!("kvslot" in globalThis)) document.getElementById("stuck").hidden = false;
  }, 5000);
})();
