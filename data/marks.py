"""The mark of a generated image: a constant XMP packet that says that a model made it.

It has the term of IPTC's vocabulary of digital source types that exiftool, Google Images and C2PA
know. As it is constant, the bytes of a file stay a function of its pixels; no pixel changes.

Source: IPTC Photo Metadata Standard 2025.1, "Digital Source Type"; ISO 16684-1 (XMP).
"""

from typing import Any

from PIL.PngImagePlugin import PngInfo

SOURCE_TYPE = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
XMP = (
    '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?><x:xmpmeta xmlns:x="adobe:ns:meta/">'
    '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description '
    'rdf:about="" xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/" '
    f'Iptc4xmpExt:DigitalSourceType="{SOURCE_TYPE}"/></rdf:RDF></x:xmpmeta><?xpacket end="r"?>'
).encode()
PNG_KEYWORD = "XML:com.adobe.xmp"  # of the text chunk that holds XMP


def xmp_settings(reader: str) -> dict[str, Any]:
    """Arguments of Pillow's `save` that store the mark, by Pillow's name of the format."""
    if reader != "PNG":
        return {"xmp": XMP}
    chunks = PngInfo()
    chunks.add_itxt(PNG_KEYWORD, XMP.decode())
    return {"pnginfo": chunks}


def is_marked(content: bytes) -> bool:
    """Whether the bytes of an image file hold the mark."""
    return XMP in content
