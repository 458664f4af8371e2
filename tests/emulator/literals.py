"""Numbers as Metal reads them: unsuffixed ones are float, ``h`` is half, ``bf`` is bfloat."""


def _as_float(digits: str) -> str:
    return (digits if "." in digits or "e" in digits.lower() else digits + ".") + "f"


def in_cxx(number: str) -> str:
    low = number.lower()
    if low.startswith("0x"):
        return number
    if low.endswith("bf"):
        return f"bfloat({_as_float(number[:-2])})"
    if low.endswith("h"):
        return f"((half){_as_float(number[:-1])})"
    if ("." in low or "e" in low) and not low.endswith("f"):
        return number.rstrip("lL") + "f"
    return number
