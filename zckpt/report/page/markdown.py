"""x"""
def render_markdown(document): return "", ""
