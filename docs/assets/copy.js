// The copy button of a block with prompts copies the code alone: without prompts and without output.
document$.subscribe(() => {
  for (const code of document.querySelectorAll(".language-pycon code")) {
    const lines = code.textContent.split("\n").filter((line) => /^(>>>|\.\.\.)( |$)/.test(line))
    const button = code.parentElement.querySelector("[data-clipboard-target]")
    if (button) button.dataset.clipboardText = lines.map((line) => line.slice(4)).join("\n")
  }
})
