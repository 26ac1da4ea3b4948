// SPDX-License-Identifier: Apache-2.0
// Makes untrusted messages and JSON safe to display. For names, see printable() in text.h.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

namespace reshard {

// Each function returns `text` with those characters replaced that a terminal interprets or does not show (controls,
// bidirectional marks, zero-width characters), so that untrusted text can neither control the terminal nor pass for
// another text.

// Escapes a message like printable(), but keeps its line breaks.
std::string printable_lines(std::string_view text);
void print_lines(std::FILE* to, std::string_view text);  // allocates nothing, so it can print "out of memory"
// Escapes a JSON text: such characters become \uNNNN, so the parsed values stay equal. Bytes that are not UTF-8 become
// U+FFFD.
std::string printable_json(std::string_view text);

}  // namespace reshard
