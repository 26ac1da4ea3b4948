"""Makes the reference of the Python package: signatures from its stub, descriptions from the docstrings of its modules."""
import ast
import inspect
from pathlib import Path

WIDTH = 100


def reference(package):
    """Returns the page, in Markdown, of the package whose directory is given."""
    stub = ast.parse((package / "__init__.pyi").read_text()).body
    docs = docstrings(package)
    # Of overloads the last one stays, which accepts the most.
    public = {n.name: n for n in stub if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith("_")}
    functions = [n for n in public.values() if isinstance(n, ast.FunctionDef)]
    classes = [n for n in public.values() if isinstance(n, ast.ClassDef)]
    groups = {
        "Functions": functions,
        "Classes": [n for n in classes if not n.name.endswith("Error")],
        "Exceptions": [n for n in classes if n.name.endswith("Error")],
    }
    out = ["# Python reference", "Made of the package's docstrings. [In Python](python.md) is the introduction."]
    for title, nodes in groups.items():
        out.append(f"## {title}")
        for node in nodes:
            out += section(node, docs)
    return "\n\n".join(out) + "\n"


def docstrings(package):
    """Returns the docstring of each function, class and method behind the public names: "Tensor.numpy" and its text."""
    out = {}
    for path in sorted(package.glob("_*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
            out[node.name] = text_of(node)
            for member in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(member, ast.FunctionDef):
                    out[f"{node.name}.{member.name}"] = text_of(member)
    return out


def text_of(node):
    return inspect.cleandoc(ast.get_docstring(node, clean=False) or "")


def section(node, docs):
    """Returns the paragraphs of a function or a class."""
    if isinstance(node, ast.FunctionDef):
        return [f"### reshard.{node.name}", code(signature(node, f"reshard.{node.name}")), docs.get(node.name, "")]
    bases = f"({', '.join(ast.unparse(b) for b in node.bases)})" if node.bases else ""
    fields = [f"    {ast.unparse(n)}" for n in node.body if isinstance(n, ast.AnnAssign)]
    out = [f"### reshard.{node.name}", code("\n".join([f"class reshard.{node.name}{bases}", *fields])), docs.get(node.name, "")]
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
            name = f"{node.name}.{member.name}"
            out += [f"#### {name}", code(signature(member, member.name)), docs.get(name, "")]
    return out


def signature(node, name):
    """Returns a function's signature, on several lines if it is long; of a property, its name and type."""
    returns = ast.unparse(node.returns) if node.returns else "None"
    if any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list):
        return f"{name}: {returns}"
    arguments = node.args
    arguments.args = [a for a in arguments.args if a.arg != "self"]
    line = f"{name}({ast.unparse(arguments)}) -> {returns}"
    if len(line) <= WIDTH:
        return line
    # Each argument on a line of its own: arguments of one kind are written by themselves.
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
    parts = [argument(a, d) for a, d in zip(arguments.args, defaults)]
    parts += ["*"] if arguments.kwonlyargs else []
    parts += [argument(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults)]
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f") -> {returns}"


def argument(node, default):
    return ast.unparse(node) + (f" = {ast.unparse(default)}" if default is not None else "")


def code(text):
    return f"```python\n{text}\n```"


if __name__ == "__main__":
    print(reference(Path(__file__).resolve().parents[2] / "tools/python/reshard"))
