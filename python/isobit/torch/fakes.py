"""The operators' results for fake tensors, which torch.compile and opcheck need, from their declarations.

A declaration in trainer_bridge/torch says what the operator returns, as a Python expression of its arguments.
The expression may call `like(tensor)`, for a tensor of the same shape and dtype; `bf16(*shape)`, `fp32`,
`fp64`, `int32` and `int64`, for a tensor of that dtype on the device of the first argument; and `sum`.
Example: `like(x), fp32(*weight.shape)`."""

import ast
from collections.abc import Callable
from typing import Any

import torch

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
}
_FUNCTIONS = {"like": torch.empty_like, "sum": sum}


def fake_of(schema: torch.FunctionSchema, result: str) -> Callable:
    """Returns the function that computes `result` from an operator's arguments.

    Raises:
        ValueError: `result` is no expression, has a name that is no argument, or has another number of
            results than the schema.
    """
    names = [argument.name for argument in schema.arguments]
    first = next(argument.name for argument in schema.arguments if str(argument.type) == "Tensor")
    where = f"result of {schema.name}"
    try:
        tree = ast.parse(result, where, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{where}: expected a Python expression, got {result!r}") from error
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    own = {node.id for node in used if isinstance(node.ctx, ast.Store)}
    unknown = {node.id for node in used} - {*names, *own, *_DTYPES, *_FUNCTIONS}
    if unknown:
        raise ValueError(f"{where}: expected names of arguments, got {', '.join(sorted(unknown))}")
    results = tree.body.elts if isinstance(tree.body, ast.Tuple) else [tree.body]
    count = 0 if result == "None" else len(results)
    if count != len(schema.returns):
        raise ValueError(f"{where}: expected {len(schema.returns)}, as in the schema, got {count}")
    code = compile(tree, where, "eval")

    def fake(*arguments: Any) -> Any:
        values = dict(zip(names, arguments, strict=True))

        def new(dtype: torch.dtype) -> Callable:
            return lambda *shape: values[first].new_empty(shape, dtype=dtype)

        return eval(code, {**_FUNCTIONS, **{name: new(dtype) for name, dtype in _DTYPES.items()}, **values})

    return fake


def register() -> None:
    for line in torch.ops.isobit.operator_results().splitlines():
        name, result = line.split(": ", 1)
        schema = getattr(torch.ops.isobit, name).default._schema
        torch.library.register_fake(f"isobit::{name}", fake_of(schema, result))
