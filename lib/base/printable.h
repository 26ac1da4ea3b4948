// Foreign text made safe to show: whole messages and JSON (names: printable() in text.h).
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

namespace reshard {

// Each returns `text` with the characters replaced that a terminal obeys or does not show (controls, those that turn
// the writing direction, those of no width), so that foreign text neither steers the terminal nor looks like another
// text.

// For a message: printable() of it, with its line breaks kept.
std::string printable_lines(std::string_view text);
void print_lines(std::FILE* to, std::string_view text);  // takes no memory: for "out of memory"
// For a JSON text: such characters become \uNNNN, so that its values stay equal; bytes that are not UTF-8 become
// U+FFFD.
std::string printable_json(std::string_view text);

}  // namespace reshard
