// Before the first paint: the theme chosen last, so that nothing flashes. A classic script, for modules run later.
try {
  const chosen = localStorage.getItem("batond.theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch {
  // No storage: the system's own theme.
}
