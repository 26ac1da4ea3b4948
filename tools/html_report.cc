#include "tools/html_report.h"

#include "lib/base/file.h"
#include "tools/job.h"

namespace reshard::tools {
namespace {

// JSON that can stand inside a <script>: these characters occur in its strings only.
std::string escaped(std::string_view json) {
  std::string out;
  out.reserve(json.size());
  for (std::size_t i = 0; i < json.size(); ++i) {
    const std::string_view rest = json.substr(i, 3);
    if (rest == "\xe2\x80\xa8" || rest == "\xe2\x80\xa9") {
      out += rest[2] == '\xa8' ? "\\u2028" : "\\u2029";
      i += 2;
    } else if (rest[0] == '<') {
      out += "\\u003c";
    } else if (rest[0] == '>') {
      out += "\\u003e";
    } else if (rest[0] == '&') {
      out += "\\u0026";
    } else {
      out += rest[0];
    }
  }
  return out;
}

}  // namespace

void add_html_option(CommandLine& line, std::string& path) {
  line.add_option("--html", path, "Write a page to look at to this file: it needs no network and no other file")
      .written();
}

std::string html_page(std::string_view command, Json data) {
  const Json page = Json::object().set("command", command).set("version", RESHARD_VERSION).set("data", std::move(data));
  const std::string_view viewer = report_viewer();
  const std::size_t mark = viewer.find(kDataMark);
  std::string out(viewer.substr(0, mark));
  out += escaped(to_text(page));
  return out += viewer.substr(mark + kDataMark.size());
}

Status write_html(const std::string& path, std::string_view command, Json data) {
  if (!leads()) return {};
  return replace_file(path, html_page(command, std::move(data)));
}

}  // namespace reshard::tools
