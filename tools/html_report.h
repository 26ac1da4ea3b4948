// What a command found as a page to look at: one file that needs no network and no other file. tools/report/ has the
// viewer.
#pragma once

#include <string>
#include <string_view>

#include "lib/base/json.h"
#include "lib/base/result.h"
#include "tools/command_line.h"

namespace reshard::tools {

// --html, alike in every command that has it.
void add_html_option(CommandLine& line, std::string& path);

// The viewer's text with the data in the place of "{{data}}" (kDataMark).
std::string_view report_viewer();
inline constexpr std::string_view kDataMark = "{{data}}";

// The page of `command` ("inspect"). `data` is its --json, and may have more members for the page alone. Nothing in it
// can end the element that it stands in: names of tensors are shown, whatever they hold.
std::string html_page(std::string_view command, Json data);

// Writes it, or replaces the file; by rank 0 alone.
Status write_html(const std::string& path, std::string_view command, Json data);

}  // namespace reshard::tools
