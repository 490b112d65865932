/* The floor under copies of rows: a loop of memcpy, nothing else.
 *
 * Row n goes from source[n] to target[n] in each of `planes` planes, which lie `span` bytes apart.
 */
#include <string.h>

void rows(char *pool, long span, long planes, const long *source, const long *target, long count, long length)
{
    for (long n = 0; n < count; n++)
        for (long plane = 0; plane < planes; plane++)
            memcpy(pool + plane * span + target[n], pool + plane * span + source[n], length);
}
