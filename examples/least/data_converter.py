from posttune import hookimpl
from posttune.types import BadRow, Record, Roles


class Pair:
    """Rows of the form {"pair": [prompt, response]}."""

    @hookimpl
    def data_converter_roles(self):
        return Roles(required=("prompt", "response"), columns={"prompt": ("pair",), "response": ("pair",)})

    @hookimpl
    def data_converter_convert(self, rows):
        for row in rows:
            pair = row.data.get("pair")
            if isinstance(pair, list) and len(pair) == 2 and all(isinstance(each, str) for each in pair):
                yield Record(row.location, prompt=pair[0], response=pair[1])
            else:
                yield BadRow(row.location, "pair is not two texts")
