// SPDX-License-Identifier: Apache-2.0
// Quotes words of commands that messages print, so that they can be pasted into a shell.
#pragma once

#include <string>
#include <string_view>

namespace reshard {

// Returns `word` quoted for bash, zsh and ksh, or unchanged if no character of it is special. Bytes that must not reach
// a terminal (printable() in text.h) become $'\xNN'.
std::string shell_word(std::string_view word);
// Quotes a path. One that begins with a dash gets "./" in front, so that no program takes it for an option.
std::string shell_path(std::string_view path);

}  // namespace reshard
