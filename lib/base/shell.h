// Commands that messages print, to be pasted into a shell.
#pragma once

#include <string>
#include <string_view>

namespace reshard {

// Returns `word` as bash, zsh and ksh read it back: as it is where no character of it means anything to them, otherwise
// in quotes. Bytes that must not reach a terminal (printable(), text.h) become $'\xNN'.
std::string shell_word(std::string_view word);
// The same of a path, which no program takes for an option: one that begins with a dash gets "./" in front.
std::string shell_path(std::string_view path);

}  // namespace reshard
