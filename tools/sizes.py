"""Lines per file and folder of src: a report, not a limit. A file past 400 lines is worth a look for a seam."""

from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "outsize"
LOOK_AGAIN_LINES = 400


def count_lines(root: Path = SOURCE) -> dict[Path, int]:
    """Per Python file below `root`, all its lines, blank ones included."""
    return {path.relative_to(root): len(path.read_text().splitlines()) for path in sorted(root.rglob("*.py"))}


def main() -> None:
    lines = count_lines()
    for folder in sorted({path.parent for path in lines}):
        members = {path: n for path, n in lines.items() if path.parent == folder and n}
        if not members:
            continue
        print(f"{sum(members.values()):6}  {folder if folder.name else 'outsize'}/")
        for path, n in sorted(members.items(), key=lambda item: -item[1]):
            print(f"{n:6}    {path.name}{'   <- a seam?' if n > LOOK_AGAIN_LINES else ''}")
    print(
        f"{sum(lines.values()):6}  in {sum(n > 0 for n in lines.values())} files; longest "
        f"{max(lines.values(), default=0)}"
    )


if __name__ == "__main__":
    main()
