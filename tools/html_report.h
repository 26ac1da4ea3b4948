// SPDX-License-Identifier: Apache-2.0
// HTML reports: the result of a command as one self-contained file. tools/report/ has its style and its script.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lib/base/json.h"
#include "lib/base/result.h"
#include "tools/command_line.h"
#include "tools/outputs.h"

namespace reshard::tools {

// Adds --html.
void add_html_option(CommandLine& line, std::string& path);

// Returns the text of the page with marks where its parts belong.
std::string_view report_viewer();
inline constexpr std::string_view kDataMark = "{{data}}";
inline constexpr std::string_view kBodyMark = "{{body}}";

// Returns the page of `command` ("inspect"), which is about `inputs`. `data` is its --json and may have further members
// for the page alone. It is escaped so that no tensor name can end the element that contains the data.
std::string html_page(std::string_view command, const std::vector<InputFacts>& inputs, Json data);

// Writes the page, replacing an earlier one. Only rank 0 writes.
Status write_html(const std::string& path, std::string_view command, const std::vector<InputFacts>& inputs, Json data);

}  // namespace reshard::tools
