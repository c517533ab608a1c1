"""The only room that formats: numbers become tables, pages, Markdown, plots and terminal output."""
