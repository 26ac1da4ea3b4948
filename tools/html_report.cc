// SPDX-License-Identifier: Apache-2.0
#include "tools/html_report.h"

#include "lib/base/file.h"
#include "lib/base/printable.h"
#include "tools/job.h"

namespace reshard::tools {
namespace {

// Returns JSON that can stand inside a <script>: "<", ">" and "&" occur only in its strings.
std::string escaped(std::string_view json) {
  std::string out;
  out.reserve(json.size());
  for (const char c : json) {
    if (c == '<')
      out += "\\u003c";
    else if (c == '>')
      out += "\\u003e";
    else if (c == '&')
      out += "\\u0026";
    else
      out += c;
  }
  return out;
}

}  // namespace

void add_html_option(CommandLine& line, std::string& path) {
  line.add_option("--html", path, "Write a self-contained HTML report to FILE").common().written();
}

std::string html_page(std::string_view command, Json data) {
  const Json page = Json::object().set("command", command).set("version", RESHARD_VERSION).set("data", std::move(data));
  const std::string_view viewer = report_viewer();
  const std::size_t mark = viewer.find(kDataMark);
  std::string out(viewer.substr(0, mark));
  out += escaped(printable_json(to_text(page)));
  return out += viewer.substr(mark + kDataMark.size());
}

Status write_html(const std::string& path, std::string_view command, Json data) {
  if (!leads()) return {};
  return replace_file(path, html_page(command, std::move(data)));
}

}  // namespace reshard::tools
