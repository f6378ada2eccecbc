// The copy button of a block with prompts copies the code alone, without prompts and output.
document.addEventListener("click", (event) => {
  const button = event.target.closest(".language-pycon [data-clipboard-target]")
  if (!button) return
  const lines = button.closest(".language-pycon").querySelector("code").textContent.split("\n")
  const code = lines.filter((line) => /^(>>>|\.\.\.)( |$)/.test(line))
  button.dataset.clipboardText = code.map((line) => line.slice(4)).join("\n")
}, true)
