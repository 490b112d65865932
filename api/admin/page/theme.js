// Before anything is drawn: light or dark, where somebody chose it here; else as the system has it.
"use strict";
(() => {
  try {
    const theme = localStorage.getItem("kvslot-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Storage may be shut; then the system decides.
  }
})();
