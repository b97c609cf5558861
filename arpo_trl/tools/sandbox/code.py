"""Runs a piece of Python as a notebook cell does: the value of a last expression is printed."""

import ast
import linecache
import sys
import threading
import traceback
import types


FILENAME = "<python>"


def run(source: str) -> int:
    """Runs `source` as `__main__`.

    Returns:
        `int`: 0, or 1 after an exception (its traceback is on stderr) or a `sys.exit` that says failure.
    """
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    linecache.cache[FILENAME] = (len(source), None, source.splitlines(keepends=True), FILENAME)
    status = 0
    try:
        tree = ast.parse(source, FILENAME)
        last = None
        if tree.body and isinstance(end := tree.body[-1], ast.Expr):
            last = ast.Expression(end.value)
            del tree.body[-1]
        exec(compile(tree, FILENAME, "exec"), main.__dict__)
        if last is not None:
            value = eval(compile(last, FILENAME, "eval"), main.__dict__)
            if value is not None:
                print(repr(value))
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    except SystemExit as exit:
        if exit.code not in (None, 0):
            status = 1
            print(f"SystemExit: {exit.code}", file=sys.stderr)
    except BaseException as error:
        status = 1
        inner = error.__traceback__
        while inner is not None and inner.tb_frame.f_code.co_filename != FILENAME:
            inner = inner.tb_next
        sys.stdout.flush()
        traceback.print_exception(type(error), error, inner)
    sys.stdout.flush()
    sys.stderr.flush()
    return status
