// SPDX-License-Identifier: Apache-2.0
#include "tools/markup.h"

#include <cmath>
#include <cstdio>

#include "lib/base/checked.h"
#include "lib/base/json.h"
#include "lib/base/text.h"

namespace reshard::tools {
namespace {

std::string element(const char* tag, std::string_view attributes, const std::string& content) {
  std::string out = std::string("<") + tag;
  if (!attributes.empty()) out.append(" ").append(attributes);
  return out + ">" + content + "</" + tag + ">";
}

std::string attribute(const char* name, std::string_view value) {
  return std::string(name) + "=\"" + markup_escaped(value) + "\"";
}

std::string real_text(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", x);
  return text;
}

}  // namespace

std::string markup_escaped(std::string_view text) {
  std::string out;
  const std::string clean = valid_utf8(printable(text));
  for (std::size_t i = 0; i < clean.size(); ++i) {
    const std::string_view rest = std::string_view(clean).substr(i);
    if (rest.starts_with("\xef\xbf\xbe") || rest.starts_with("\xef\xbf\xbf")) {
      out += rest[2] == '\xbe' ? "\\ufffe" : "\\uffff";
      i += 2;
      continue;
    }
    switch (rest.front()) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += rest.front();
    }
  }
  return out;
}

HtmlCell text_cell(std::string_view text) { return {markup_escaped(text), {}}; }
HtmlCell name_cell(std::string_view name) { return {element("code", {}, markup_escaped(name)), {}}; }
HtmlCell count_cell(long long n) { return {with_commas(n), std::to_string(n)}; }
HtmlCell bytes_cell(long long n) { return {human_bytes(n), std::to_string(n)}; }
HtmlCell real_cell(double x) {
  if (!std::isfinite(x)) return {"not finite", "Infinity"};
  return {real_text(x), real_text(x)};
}

HtmlTable::HtmlTable(std::string_view name, const std::vector<std::string>& heads) : name_(name) {
  for (const std::string& head : heads) {
    is_number_.push_back(head.starts_with('#'));
    head_ += element("th", is_number_.back() ? "class=\"number\"" : "", markup_escaped(head.substr(is_number_.back())));
  }
}

void HtmlTable::add(const std::vector<HtmlCell>& cells, std::string_view id) {
  if (++rows_ > kMostRows) return;
  std::string row;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    std::string attributes = is_number_[i] ? "class=\"number\"" : "class=\"text\"";
    if (!cells[i].sort.empty()) attributes += " " + attribute("data-value", cells[i].sort);
    row += element("td", attributes, cells[i].html);
  }
  body_ += element("tr", id.empty() ? "" : attribute("id", id), row) + "\n";
}

std::string HtmlTable::html() const {
  if (rows_ == 0) return {};
  const std::string table =
      element("table", attribute("data-name", name_),
              element("thead", {}, element("tr", {}, head_)) + "\n" + element("tbody", {}, body_));
  const std::string label = "class=\"scroll\" tabindex=\"0\" role=\"region\" " + attribute("aria-label", name_);
  std::string out = element("div", label, table);
  if (rows_ > kMostRows)
    out += element("p", "class=\"hint\"", "and " + with_commas(rows_ - kMostRows) + " more (--json has all)");
  return out;
}

std::string html_section(std::string_view title, const std::string& content) {
  if (content.empty()) return {};
  return element("section", {}, element("h2", {}, markup_escaped(title)) + "\n" + content) + "\n";
}

std::string html_list(const std::vector<std::string>& texts, std::string_view css_class, std::size_t most) {
  if (texts.empty()) return {};
  std::string items;
  for (std::size_t i = 0; i < texts.size() && i < most; ++i) items += element("li", {}, markup_escaped(texts[i]));
  if (texts.size() > most) items += element("li", {}, "and " + with_commas(texts.size() - most) + " more");
  return element("ul", css_class.empty() ? "" : attribute("class", css_class), items);
}

std::string html_facts(const std::vector<std::pair<std::string, std::string>>& facts) {
  std::string out;
  for (const auto& [label, value] : facts)
    if (!value.empty())
      out += element("div", {}, element("dt", {}, markup_escaped(label)) + element("dd", {}, markup_escaped(value)));
  return out.empty() ? out : element("dl", "class=\"tiles\"", out) + "\n";
}

}  // namespace reshard::tools
